//! What the kubelet reports: which HCAs it allocated to a pod.
//!
//! A device ID that stands in a network proves nothing, because a namespace's user may write it.
//! The daemon of this node asks the kubelet (PodResources) and answers over a unix socket. A pod
//! has an HCA when one of its units, of whatever device plugin, names the whole of it: a share of an
//! HCA does not entitle to take the HCA away.

use std::{collections::BTreeSet, path::Path, time::Duration};

use attachment::log::Log;
use cni_wire::{Args, Code};
use hca::{HcaId, UnitId};
use node_wire::{ClientError, FailureKind, Pod, client};

use crate::error::Error;

/// How long the daemon may take.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The HCAs of a pod's exclusive units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// The HCAs that it has as a whole.
    pub hcas: BTreeSet<HcaId>,
}

impl Allocated {
    /// Out of unit IDs of any device plugin. Pure.
    fn of<'a>(pod: String, units: impl IntoIterator<Item = &'a str>) -> Self {
        let whole = |unit: &str| match unit.parse() {
            Ok(UnitId::Exclusive(hca)) => Some(hca),
            _ => None,
        };
        Allocated {
            pod,
            hcas: units.into_iter().filter_map(whole).collect(),
        }
    }
}

/// Asks which HCAs the request's pod has.
///
/// A daemon that cannot distinguish the pod from another of its name says so: that is logged where
/// the runtime gave the UID by which the daemon should know it.
///
/// # Errors
/// Code 4 when the runtime does not say which pod this is; code 11 when the daemon does not answer,
/// so that the runtime tries again; code 101 when the kubelet knows another pod of this name.
pub fn ask(socket: &Path, args: &Args, log: &Log) -> Result<Allocated, Error> {
    let pod = pod_of(args)?;
    let held = client::pod_units(socket, &pod, TIMEOUT).map_err(|e| refused(&e, &pod))?;
    if pod.uid.is_some() && !held.uid_checked {
        let note = held
            .uid_note
            .as_deref()
            .unwrap_or("the daemon does not say why");
        log.warn(format_args!(
            "the units of pod {pod} are those of a pod of this name; its UID was not checked: {note}"
        ));
    }
    let units = held.allocations.iter().flat_map(|one| &one.units);
    Ok(Allocated::of(
        format!("{}/{}", pod.namespace, pod.name),
        units.map(String::as_str),
    ))
}

/// The pod that a request is for.
///
/// # Errors
/// Code 4 when the runtime does not say which pod this is.
pub(crate) fn pod_of(args: &Args) -> Result<Pod, Error> {
    let given = |key: &str| {
        let value = args.get(key).filter(|value| !value.is_empty());
        value.map(str::to_owned)
    };
    let required = |key: &str| {
        given(key).ok_or_else(|| {
            Error::new(
                Code::InvalidEnvironment,
                format!("CNI_ARGS has no {key}: the kubelet cannot be asked what the pod has"),
            )
            .with_details(
                "without a kubelet, set allow.unallocated in the node's policy: it lets any \
                 network take any netdev that the policy allows",
            )
        })
    };
    Ok(Pod {
        namespace: required("K8S_POD_NAMESPACE")?,
        name: required("K8S_POD_NAME")?,
        uid: given("K8S_POD_UID"),
    })
}

fn refused(error: &ClientError, pod: &Pod) -> Error {
    let what = format!("ask which HCAs the kubelet allocated to pod {pod}: {error}");
    match error.failure().map(|failure| failure.kind) {
        Some(FailureKind::AnotherPod) => Error::new(Code::Policy, what).with_details(
            "the pod was replaced; its new namespace is attached by a call of its own",
        ),
        // A daemon that is being replaced, or a kubelet that starts, answers a moment later.
        _ => Error::new(Code::TryAgain, what).with_details(
            "the runtime tries again; if it goes on: kubectl -n kube-system logs \
             ds/rdma-device-plugin on this node",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_hcas_count_and_shares_do_not() {
        let units = [
            "0000:3b:00.2",
            "mlx5_core.sf.4",
            "guid-505400fffe000001",
            "0000:5e:00.0_3e71787e_17",
            "pool_3e71787e_3",
            "GPU-7c2f",
            "0",
        ];
        let allocated = Allocated::of("ml/a".into(), units);
        let hcas: Vec<String> = allocated.hcas.iter().map(ToString::to_string).collect();
        assert_eq!(
            hcas,
            ["0000:3b:00.2", "mlx5_core.sf.4", "guid-505400fffe000001"]
        );
    }

    #[test]
    fn a_call_without_a_pod_is_distinguished_from_an_absent_daemon() {
        let socket = Path::new("/nonexistent/node.sock");
        let log = Log::new(&node::policy::Log::default(), "test", "");
        for args in [
            "",
            "K8S_POD_NAMESPACE=ml",
            "K8S_POD_NAMESPACE=ml;K8S_POD_NAME=",
        ] {
            let none = ask(socket, &Args::parse(args).unwrap(), &log).unwrap_err();
            assert_eq!(none.code, Code::InvalidEnvironment, "{args}");
            assert!(none.details.contains("allow.unallocated"), "{none}");
        }
        let args = Args::parse("K8S_POD_NAMESPACE=ml;K8S_POD_NAME=a").unwrap();
        let away = ask(socket, &args, &log).unwrap_err();
        assert_eq!(away.code, Code::TryAgain);
        assert!(away.msg.contains("pod ml/a"), "{away}");
    }
}
