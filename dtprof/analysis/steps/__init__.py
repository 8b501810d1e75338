"""Steps: their boundaries, their partition, and their throughput."""
