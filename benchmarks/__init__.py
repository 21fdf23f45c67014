"""Load tests of hone against floors and peers; see docs/benchmarks.md."""
