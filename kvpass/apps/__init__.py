"""Applications on top of the library: nothing outside of this folder imports it, but tests and benchmarks do."""
