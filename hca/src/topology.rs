//! Where GPUs and NICs sit, how far they are from each other, and which NICs to take for which
//! GPUs.
//!
//! - [`distance`]: the classes of `nvidia-smi topo -m`, from places in the PCI tree
//! - [`numa`], [`gpu`], [`nic`], [`rail`]: what is read
//! - `data_direct`: where a NIC's DMA to GPUs comes from, if not from the NIC's own place
//! - [`machine`]: all of it, one value
//! - [`mod@choose`]: NICs for GPUs, a pure function

mod assign;
pub mod choose;
mod data_direct;
pub mod distance;
pub mod gpu;
pub mod machine;
pub mod nic;
pub mod numa;
pub mod rail;

pub use choose::{Choice, Pair, Request, choose};
pub use distance::{Class, Distance, PciLocation};
pub use gpu::Gpu;
pub use machine::Machine;
pub use nic::Nic;
pub use numa::{Numa, NumaNode};
pub use rail::Rail;
