//! Parses and calls.

fn main() {}
