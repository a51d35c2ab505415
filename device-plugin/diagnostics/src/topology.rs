//! The node's GPUs and NICs: as a matrix, as JSON, as a picture.
//!
//! - [`nccl`]: topology files of clouds, where sysfs says too little
//! - `alignment`: pods whose NICs are farther from their GPUs than they need be
//! - `holders`: which pod has which device, from the kubelet's device IDs
//! - `view`: the machine, its holders and the notes on it; also the JSON document
//! - `matrix`, `picture`: the view as text and as SVG

mod alignment;
mod holders;
mod matrix;
pub mod nccl;
mod picture;
mod view;

pub use alignment::{Alignment, Misaligned, alignment};
pub use holders::Holders;
pub use matrix::{text, text_with_matrix};
pub use picture::svg;
pub use view::View;
