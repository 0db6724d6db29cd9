"""Tests of parameter servers; a package, because other folders have tests of the same file names."""
