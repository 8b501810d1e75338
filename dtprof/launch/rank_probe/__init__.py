"""The probe of `dtprof doctor`: runs in the ranks of a launch, in place of the user's program."""
