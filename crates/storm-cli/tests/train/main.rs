//! `storm train`, called as people call it, and killed as machines do.

mod afterwards;
mod folder;
mod runs;
mod support;
