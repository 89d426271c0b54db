//! The server binary: parse, then serve.
fn main() {}
