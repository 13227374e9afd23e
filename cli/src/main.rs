//! Command line of flashtile.
fn main() {}
