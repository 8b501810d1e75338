"""What `dtprof doctor` says of a launch, from the documents that its ranks left."""
