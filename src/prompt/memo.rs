//! Placeholder.
#[derive(Debug)]
pub(super) struct Memo;
impl Memo {
    pub(super) fn new(_bytes: usize) -> Memo {
        Memo
    }
}
