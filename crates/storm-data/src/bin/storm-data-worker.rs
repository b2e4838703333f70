//! The process that runs third-party code on untrusted files, for programs that cannot start themselves again.

fn main() -> std::io::Result<()> {
    storm_data::run_worker()
}
