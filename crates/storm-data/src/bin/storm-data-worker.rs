//! The worker process for third-party code, for programs that cannot start themselves again.

fn main() -> std::io::Result<()> {
    storm_data::run_worker()
}
