//! Late binding, decided: which HCA each slot of a pod becomes, whose an HCA is, and whether a binding
//! is over. The daemon reads what there is, and acts.

pub mod alignment;
pub mod decide;
pub mod plan;
pub mod record;
pub mod state;
