"""Record one process of the job. Standard library and torch only; nothing here may harm the job."""
