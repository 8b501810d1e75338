"""Record what one process of the job does. Standard library and torch only; nothing here may harm the job."""
