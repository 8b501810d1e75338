"""From records, Flight Recorder dumps and logs to one verdict: who, where, why, how to mend it."""
