//! Placeholder: filled by the module's own change.
