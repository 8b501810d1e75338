"""What a diagnosis starts from: records, Flight Recorder dumps, plain logs."""
