//! One task per pod that asks the engine for its numbers.
