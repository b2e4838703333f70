//! `storm train`, called as people call it, and killed as machines do.

mod afterwards;
mod runs;
mod support;
