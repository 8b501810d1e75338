"""Sources of a diagnosis: records, Flight Recorder dumps, plain logs."""
