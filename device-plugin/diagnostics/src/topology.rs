//! The node's GPUs and NICs: as a matrix, as JSON, as a picture.
//!
//! - [`nccl`]: topology files of clouds, where sysfs says too little
//! - `holders`: which pod has which device, from the kubelet's device IDs
//! - `view`: the machine, its holders and the notes on it; also the JSON document
//! - `matrix`, `picture`: the view as text and as SVG

mod holders;
mod matrix;
pub mod nccl;
mod picture;
mod view;

pub use holders::Holders;
pub use matrix::text;
pub use picture::svg;
pub use view::View;
