//! Late binding: slots of a pod become the HCAs nearest to the pod's GPUs, all at once, when the
//! pod's network is made.
//!
//! - [`gpus`]: which GPU a device ID means, a table for all vendors;
//! - [`decide`]: which HCA each slot becomes, pure, with the choice that `topology --gpus` shows;
//! - [`store`]: the bindings, one file for each HCA;
//! - [`slot_specification`]: what a container gets for a slot;
//! - [`evidence`]: when a binding is over, pure;
//! - [`alignment`]: how well the HCAs of each pod fit its GPUs, pure;
//! - [`places`]: what bindings and journal have, and whether CDI files can be written;
//! - [`pod_slots`]: the slots that a pod has, and the decision for all of a pool;
//! - [`binder`]: reads, decides and acts, for the CNI plugin and for the kubelet;
//! - [`commit`]: writes what containers get once the devices are in place;
//! - [`release`]: the loop that frees bindings whose pods ended without DEL.
//!
//! In this order a pod gets an HCA: binding file, device moved, CDI file. In this order it loses it:
//! CDI file, device returned, binding file. So a CDI file never names an HCA that another pod is
//! bound to, whenever a process dies.

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
