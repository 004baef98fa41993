//! The `sidestep` program: arguments in, one command, an exit code out.

fn main() -> std::process::ExitCode {
    sidestep::cli::main()
}
