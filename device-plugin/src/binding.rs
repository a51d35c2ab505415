//! Late binding: slots of a pod become the HCAs nearest to the pod's GPUs, all at once, when the
//! pod's network is made.
//!
//! [`store`] has the bindings. [`binder`] answers the CNI plugin and the kubelet: it asks the kubelet and
//! the GPUs, reads what else there is ([`evidence`]), has [`pools::binding`] decide, and acts. [`commit`]
//! writes what containers get. [`containers`] and [`contexts`] read the kernel's word on who uses an HCA,
//! and [`garbage`] acts on it.
//!
//! A pod gets an HCA in this order: binding file, device moved, CDI file. It loses it in the opposite
//! order: CDI file, device returned, binding file. So a CDI file never names an HCA that another pod
//! is bound to, whenever a process dies.

pub(crate) mod binder;
mod commit;
mod containers;
pub(crate) mod contexts;
mod evidence;
pub(crate) mod garbage;
mod slot_files;
pub(crate) mod store;
