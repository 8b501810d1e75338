"""From the Flight Recorder dumps of a job's ranks to one verdict."""
