//! Why an attachment cannot be undone, or the node not be used.

use std::{path::PathBuf, time::Duration};

use ::node::policy::PolicyError;
use netlink::Name;

use crate::{
    cdi_file::CdiError,
    journal::{self, Record},
    netdev::{restore, snapshot::Snapshot},
};

/// A failure. What the specification's code for it is, the CNI plugin says.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The node's policy is wrong.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The kernel refused a request.
    #[error(transparent)]
    Kernel(#[from] netlink::Error),
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// A file that the daemon writes for the CNI programs cannot be read.
    #[error("read {}: {cause}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// The RDMA hardware cannot be read.
    #[error(transparent)]
    Hardware(#[from] hca::Error),
    /// A moved netdev did not return.
    #[error(transparent)]
    Netdev(#[from] restore::Error),
    /// A moved RDMA device did not return.
    #[error("RDMA device {name} is neither on the host nor in the pod after {waited:?}")]
    RdmaNowhere {
        /// Its name on the host.
        name: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A child may live in a namespace that cannot be found.
    #[error(
        "{kind} {name} on {master} of {owner} is not in its pod, which moved links to a network \
         namespace without a thread"
    )]
    ChildNowhere {
        /// Its kind.
        kind: String,
        /// Its name in the pod.
        name: String,
        /// The netdev below it.
        master: String,
        /// Whose it is.
        owner: String,
    },
    /// The pod's namespace is over and something of the attachment is not found.
    #[error("the record and the addresses of {owner} stay: {missing}")]
    Kept {
        /// Whose attachment it is.
        owner: String,
        /// What is not found.
        missing: Box<Error>,
    },
    /// The GUIDs of a VF cannot be restored.
    #[error("{netdev} may have the GUID of {owner}: its PF {pf} has no netdev on the host")]
    PfAway {
        /// The VF's netdev.
        netdev: Name,
        /// Whose attachment it was.
        owner: String,
        /// PCI address of the PF.
        pf: String,
    },
    /// An RDMA device does not change its namespace.
    #[error(transparent)]
    RdmaMove(netlink::Error),
    /// What the IPAM answered, or why it cannot be asked; in its own text, with its own code.
    #[error(transparent)]
    Ipam(#[from] cni_wire::Error),
    /// A CDI file of a slot cannot be removed.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// Several parts of an attachment could not be undone.
    #[error("{first}{}", others.iter().map(|one| format!("; {one}")).collect::<String>())]
    Several {
        /// The first failure.
        first: Box<Error>,
        /// The others, in order.
        others: Vec<Error>,
    },
}

impl Error {
    /// The GUIDs of the VF that returns from an attachment stay: `pf` is away.
    pub fn pf_away(record: &Record, vf: &Snapshot, pf: String) -> Self {
        Error::PfAway {
            netdev: vf.name.clone(),
            owner: record.owner(),
            pf,
        }
    }

    /// Whether something of an attachment was not found, and nothing else is wrong.
    pub(crate) fn is_nowhere(&self) -> bool {
        matches!(
            self,
            Error::Netdev(restore::Error::Nowhere { .. })
                | Error::RdmaNowhere { .. }
                | Error::ChildNowhere { .. }
        )
    }

    /// The failures of an attachment's parts as one; none without any.
    pub(crate) fn all(failures: Vec<Error>) -> Option<Error> {
        let mut failures = failures.into_iter();
        let first = failures.next()?;
        let others: Vec<Error> = failures.collect();
        Some(match others.is_empty() {
            true => first,
            false => Error::Several {
                first: Box::new(first),
                others,
            },
        })
    }

    /// The failure with its remedy, for people.
    pub fn with_remedy(&self) -> String {
        match (self, self.remedy()) {
            (Error::Several { first, others }, _) => std::iter::once(&**first)
                .chain(others)
                .map(Error::with_remedy)
                .collect::<Vec<_>>()
                .join("; "),
            // It says its own.
            (Error::Ipam(_), _) | (_, None) => self.to_string(),
            (_, Some(remedy)) => format!("{self} ({remedy})"),
        }
    }

    /// What the person on call does about it; none where the message says it all.
    pub fn remedy(&self) -> Option<String> {
        let remedy = match self {
            Error::Policy(e) => return Some(e.remedy().to_string()),
            Error::Journal(e) => e.remedy()?,
            Error::Ipam(e) => return Some(e.details.clone()).filter(|text| !text.is_empty()),
            Error::Several { first, .. } => return first.remedy(),
            Error::State { .. } => {
                "the daemon of this node writes it; restart rdma-device-plugin (nothing is \
                 attached without it, because it protects the node's own netdevs and HCAs of \
                 exclusive pools)"
            }
            Error::Netdev(restore::Error::Nowhere { .. }) | Error::RdmaNowhere { .. } => {
                "a namespace that is being torn down still has it; try again"
            }
            Error::ChildNowhere { .. } | Error::Kept { .. } => {
                "end what holds the network namespaces that the pod made, and the daemon undoes the \
                 attachment; if the interface is known to be gone, remove the record of the \
                 attachment from stateDir/attachments and release its addresses with rdma-ipam \
                 release"
            }
            Error::PfAway { .. } => {
                "no pod gets the VF until its GUIDs are restored: return the PF's netdev to the host, \
                 then run rdmactl attachments reclaim, or let the next ADD do it"
            }
            Error::Netdev(restore::Error::Ambiguous { .. }) => {
                "delete those of them that are not it, or end the pod's namespace, then try again"
            }
            Error::RdmaMove(e) if e.is(libc::EOPNOTSUPP) => {
                "its driver cannot be moved between namespaces, or the RDMA subsystem is not in \
                 exclusive mode any more (rdma system show)"
            }
            Error::Kernel(_)
            | Error::Cdi(_)
            | Error::Hardware(_)
            | Error::Netdev(restore::Error::Kernel(_))
            | Error::RdmaMove(_) => return None,
        };
        Some(remedy.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_is_said_with_its_own_remedy_and_once() {
        let away = || Error::RdmaNowhere {
            name: "mlx5_1".into(),
            waited: Duration::from_secs(5),
        };
        let ipam = || {
            let error = cni_wire::Error::new(cni_wire::Code::Exhausted, "no address");
            Error::from(error.with_details("free one"))
        };
        assert!(Error::all(Vec::new()).is_none());
        let one = Error::all(vec![away()]).unwrap().with_remedy();
        assert_eq!(one, away().with_remedy());
        assert!(
            one.contains("mlx5_1") && one.ends_with("try again)"),
            "{one}"
        );
        assert_eq!(ipam().with_remedy(), "no address (free one)");
        let both = Error::all(vec![away(), ipam()]).unwrap().with_remedy();
        assert_eq!(both, format!("{one}; no address (free one)"));
    }
}
