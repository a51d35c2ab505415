//! Late binding: slots of a pod become the HCAs nearest to the pod's GPUs, all at once, when the
//! pod's network is made.
//!
//! [`binder`] reads, decides ([`decide`]) and acts, for the CNI plugin and for the kubelet.
//! [`release`] frees the bindings whose pods ended without DEL.
//!
//! A pod gets an HCA in this order: binding file, device moved, CDI file. It loses it in the opposite
//! order: CDI file, device returned, binding file. So a CDI file never names an HCA that another pod
//! is bound to, whenever a process dies.

pub(crate) mod alignment;
pub(crate) mod binder;
pub(crate) mod commit;
pub(crate) mod decide;
pub(crate) mod evidence;
pub(crate) mod gpus;
pub(crate) mod places;
pub(crate) mod pod_slots;
pub(crate) mod release;
pub(crate) mod slot_specification;
pub(crate) mod store;
