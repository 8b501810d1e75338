"""The screen of `dtprof top`."""
