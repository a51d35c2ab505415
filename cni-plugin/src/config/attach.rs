//! `attach`: what becomes the pod's interface.

use cni_wire::text::one_of;
use serde::Deserialize;

/// What becomes the pod's interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Attach {
    #[default]
    Move,
    Child(ChildKind),
    /// No interface: the RDMA device of one that another plugin of the chain made.
    RdmaOnly,
}

cni_wire::words! {
    /// Kinds of children, by the names that they have in the kernel.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ChildKind {
        /// With a MAC address of its own.
        Macvlan = "macvlan",
        /// With its parent's MAC address.
        Ipvlan = "ipvlan",
        /// In a partition of an InfiniBand port.
        Ipoib = "ipoib",
    }
}

impl Attach {
    /// As written in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Attach::Move => "move",
            Attach::Child(kind) => kind.as_str(),
            Attach::RdmaOnly => "rdma-only",
        }
    }

    fn all() -> impl Iterator<Item = Attach> {
        let children = ChildKind::ALL.map(Attach::Child).into_iter();
        children.chain([Attach::Move, Attach::RdmaOnly])
    }

    /// All kinds, for messages.
    pub(super) fn words() -> String {
        one_of(Attach::all().map(Attach::as_str))
    }
}

impl TryFrom<String> for Attach {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut all = Attach::all();
        all.find(|attach| attach.as_str() == text)
            .ok_or_else(|| format!("must be {}", Attach::words()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_read_by_its_word() {
        for attach in Attach::all() {
            assert_eq!(Attach::try_from(attach.as_str().to_owned()), Ok(attach));
        }
        assert_eq!(Attach::all().count(), ChildKind::ALL.len() + 2);
        assert!(Attach::try_from("Macvlan".to_owned()).is_err());
    }
}
