//! End-to-end tests: the built binaries driven from outside, and the stand-ins they need.
