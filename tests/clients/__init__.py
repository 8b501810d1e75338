"""Small training programs of real frameworks, and what dtprof must say of them: `make clients`."""
