//! The node's GPUs and NICs, shown: as a matrix, as JSON, as a picture.
//!
//! - [`nccl`]: topology files of clouds, where sysfs says too little
//! - [`holders`]: which pod has which device, as the kubelet knows it
//! - [`view`]: what is shown, and what there is to remark on it
//! - [`matrix`], [`picture`]: the faces

pub mod holders;
pub mod matrix;
pub mod nccl;
pub mod picture;
pub mod view;
