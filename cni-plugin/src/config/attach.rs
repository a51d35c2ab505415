//! `attach`: what becomes the pod's interface.

use cni_wire::{Code, Error, Section};

/// What becomes the pod's interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

    /// Reads `attach`. Only in the RDMA CNI plugin's place it may be missing.
    ///
    /// # Errors
    /// Code 7: it is missing, or not a kind of attachment.
    pub(super) fn read(root: &Section<'_>) -> Result<Attach, Error> {
        let error = match root.text("attach")? {
            None if replaces_rdma_cni(root)? => return Ok(Attach::RdmaOnly),
            None => Error::new(Code::InvalidConfig, "attach is missing"),
            Some(text) => match Attach::parse(text) {
                Some(attach) => return Ok(attach),
                None => root.wrong(
                    "attach",
                    format_args!("{text:?} is not a kind of attachment"),
                ),
            },
        };
        let kinds = one_of(Attach::all().map(Attach::as_str));
        Err(error.with_details(format!("set it to {kinds}")))
    }

    fn all() -> impl Iterator<Item = Attach> {
        let children = ChildKind::ALL.into_iter().map(Attach::Child);
        [Attach::Move]
            .into_iter()
            .chain(children)
            .chain([Attach::RdmaOnly])
    }

    fn parse(text: &str) -> Option<Attach> {
        Attach::all().find(|attach| attach.as_str() == text)
    }
}

/// As in `macvlan, ipvlan or ipoib`.
pub(super) fn one_of(words: impl Iterator<Item = &'static str>) -> String {
    let words: Vec<&str> = words.collect();
    match words.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

/// The `type` under which the RDMA CNI plugin is installed.
const RDMA_CNI: &str = "rdma";

/// Whether this plugin is installed in the RDMA CNI plugin's place, and does what that does.
pub(super) fn replaces_rdma_cni(root: &Section<'_>) -> Result<bool, Error> {
    Ok(root.text("type")? == Some(RDMA_CNI))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_read_by_its_word() {
        for attach in Attach::all() {
            assert_eq!(Attach::parse(attach.as_str()), Some(attach));
        }
        assert_eq!(Attach::all().count(), ChildKind::ALL.len() + 2);
        assert_eq!(Attach::parse("Macvlan"), None);
    }
}
