//! Compiles the project's own protocol files without `protoc`.
fn main() {
    println!("cargo::rerun-if-changed=proto");
}
