"""`make gpu`: what dtprof costs and how exact it is on a GPU, measured in parts of under ten minutes each."""
