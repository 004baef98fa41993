//! Black-box and repository tests, one binary.

mod architecture;
mod extproc_grpc;
