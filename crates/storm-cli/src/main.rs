//! The `storm` command line.
fn main() {}
