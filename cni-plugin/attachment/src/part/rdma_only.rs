//! RDMA devices that follow an interface of another plugin. They are moved, returned and checked
//! with those of moved netdevs ([`crate::rdma`]); there is nothing else of this kind.

use serde::{Deserialize, Serialize};

use crate::journal::{RdmaDevice, Slot};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RdmaOnly {
    /// `CNI_IFNAME`.
    pub interface: String,
    /// Those that move; none in shared mode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rdma: Vec<RdmaDevice>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<Slot>,
}
