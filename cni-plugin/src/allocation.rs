//! What the kubelet reports: which HCAs it allocated to a pod.
//!
//! A device ID that stands in a network proves nothing, because a namespace's user may write it.
//! The daemon of this node asks the kubelet (PodResources) and answers over a unix socket. A pod
//! has an HCA when one of its units, of whatever device plugin, names the whole of it: a share of an
//! HCA does not entitle to take the HCA away.

use std::{collections::BTreeSet, path::Path, time::Duration};

use attachment::log::Log;
use cni_wire::{Args, Code, text::bounded};
use hca::{HcaId, UnitId};
use node_wire::{Allocation, ClientError, FailureKind, Pod, client};

use crate::{config, error::Error};

/// How long the daemon may take.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The HCAs that a pod has as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// The pod, as `namespace/name`.
    pub pod: String,
    pub hcas: BTreeSet<HcaId>,
}

/// What the kubelet allocated to a pod, of any device plugin.
#[derive(Clone, Debug)]
pub struct Held {
    pod: String,
    allocations: Vec<Allocation>,
}

/// The HCAs that a pod has by one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    pub resource: String,
    /// The HCAs, each once, in the order of their identities.
    pub hcas: BTreeSet<HcaId>,
    /// All HCAs of the resource's pool on this node, in that order; none where the daemon does not
    /// report them.
    pub pool: Option<Vec<HcaId>>,
}

impl Held {
    pub fn allocated(&self) -> Allocated {
        let exclusive = |unit: &String| match unit.parse() {
            Ok(UnitId::Exclusive(hca)) => Some(hca),
            _ => None,
        };
        let units = self.allocations.iter().flat_map(|one| &one.units);
        Allocated {
            pod: self.pod.clone(),
            hcas: units.filter_map(exclusive).collect(),
        }
    }

    /// All HCAs of the resource of which the pod has the unit: where the daemon has said what the units
    /// became, `bound`. Pure.
    ///
    /// # Errors
    /// Code 101: the unit is not the pod's, or is a unit of two resources; code 50: the HCAs of its units
    /// are unknown.
    pub fn devices(
        &self,
        unit: &config::Allocation,
        bound: Option<BTreeSet<HcaId>>,
    ) -> Result<Devices, Error> {
        let Allocation { resource, pool, .. } = self.allocation_of(unit)?;
        let mut devices = Devices {
            resource: resource.clone(),
            hcas: BTreeSet::new(),
            pool: pool.as_deref().map(parsed).transpose()?,
        };
        if let Some(bound) = bound {
            devices.hcas = bound;
            return Ok(devices);
        }
        for one in &self.allocations {
            match &one.hcas {
                _ if one.resource != *resource => {}
                Some(named) => devices.hcas.extend(parsed(named)?),
                None => {
                    for unit in &one.units {
                        devices.hcas.insert(hca_of(unit, resource)?);
                    }
                }
            }
        }
        if devices.hcas.is_empty() {
            let unit = bounded(&unit.text, 100);
            return Err(Error::advise(
                Code::Unavailable,
                format_args!("unit {unit} of {resource} does not stand for an HCA of this node"),
                "delete the pod, so that another unit is allocated",
            ));
        }
        Ok(devices)
    }

    /// The allocation that a unit is of.
    fn allocation_of(&self, unit: &config::Allocation) -> Result<&Allocation, Error> {
        // A network can have the PCI address in capitals.
        let is_it =
            |other: &String| *other == unit.text || other.parse().as_ref() == Ok(&unit.unit);
        let mut found = self
            .allocations
            .iter()
            .filter(|one| one.units.iter().any(is_it));
        let (pod, text) = (&self.pod, bounded(&unit.text, 100));
        let Some(first) = found.next() else {
            let all = self.allocations.iter().flat_map(|one| &one.units);
            let all: Vec<&str> = all.map(String::as_str).collect();
            let has = match all.as_slice() {
                [] => "it has no unit".to_owned(),
                some => format!("it has {}", bounded(&some.join(", "), 500)),
            };
            return Err(Error::advise(
                Code::Policy,
                format_args!("pod {pod}: the kubelet did not allocate unit {text} to it; {has}"),
                "request the resource that the network names \
                 (k8s.v1.cni.cncf.io/resourceName) in a container of the pod",
            ));
        };
        let resource = &first.resource;
        if let Some(other) = found.find(|other| other.resource != *resource) {
            let other = &other.resource;
            return Err(Error::advise(
                Code::Policy,
                format_args!(
                    "pod {pod}: unit {text} is one of {resource} and one of {other}: which of them the \
                     network is about is not clear"
                ),
                "let one device plugin offer an HCA, under one resource",
            ));
        }
        Ok(first)
    }
}

fn parsed(names: &[String]) -> Result<Vec<HcaId>, Error> {
    let parse = |name: &String| {
        name.parse().map_err(|e: hca::ParseError| {
            Error::advise(
                Code::Decode,
                format_args!("the daemon names an HCA {name:?}: {e}"),
                "install all programs of one release",
            )
        })
    };
    names.iter().map(parse).collect()
}

/// The HCA of a unit of another device plugin.
fn hca_of(unit: &str, resource: &str) -> Result<HcaId, Error> {
    let id = unit.parse::<UnitId>().ok();
    id.and_then(|id| id.hca().cloned()).ok_or_else(|| {
        let unit = bounded(unit, 100);
        Error::advise(
            Code::Unavailable,
            format_args!(
                "unit {unit} of {resource} does not name its HCA, and its device plugin is not \
                 rdma-device-plugin"
            ),
            "leave devices out and name the netdev with master or device",
        )
    })
}

/// Asks what the request's pod has.
///
/// A daemon that cannot distinguish the pod from another of its name says so: that is logged where
/// the runtime gave the UID by which the daemon should know it.
///
/// # Errors
/// Code 4 when the runtime does not say which pod this is; code 11 when the daemon does not answer,
/// so that the runtime tries again; code 101 when the kubelet knows another pod of this name.
pub fn ask(socket: &Path, args: &Args, log: &Log) -> Result<Held, Error> {
    let pod = pod_of(args)?;
    let held = client::ask(socket, &pod, TIMEOUT).map_err(|e| refused(&e, &pod))?;
    if pod.uid.is_some() && !held.uid_checked {
        let note = held
            .uid_note
            .as_deref()
            .unwrap_or("the daemon does not say why");
        log.warn(format_args!(
            "the units of pod {pod} are those of a pod of this name; its UID was not checked: {note}"
        ));
    }
    Ok(Held {
        pod: format!("{}/{}", pod.namespace, pod.name),
        allocations: held.allocations,
    })
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
            Error::advise(
                Code::InvalidEnvironment,
                format_args!("CNI_ARGS has no {key}: the kubelet cannot be asked what the pod has"),
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
    let (code, remedy) = match error.failure().map(|failure| failure.kind) {
        Some(FailureKind::AnotherPod) => (
            Code::Policy,
            "the pod was replaced; its new namespace is attached by a call of its own",
        ),
        // A daemon that is being replaced, or a kubelet that starts, answers a moment later.
        _ => (
            Code::TryAgain,
            "the runtime tries again; if it goes on: kubectl -n kube-system logs \
             ds/rdma-netdev on this node",
        ),
    };
    let what = format_args!("ask which HCAs the kubelet allocated to pod {pod}: {error}");
    Error::advise(code, what, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_hcas_count_and_shares_do_not() {
        let units: &[&str] = &[
            "0000:3b:00.2",
            "mlx5_core.sf.4",
            "guid-505400fffe000001",
            "0000:5e:00.0_3e71787e_17",
            "pool_3e71787e_3",
            "GPU-7c2f",
            "0",
        ];
        let allocated = held(&[("a", "rdma/nic", units, None)]).allocated();
        let hcas: Vec<String> = allocated.hcas.iter().map(ToString::to_string).collect();
        assert_eq!(
            hcas,
            ["0000:3b:00.2", "mlx5_core.sf.4", "guid-505400fffe000001"]
        );
    }

    /// Container, resource, units and, of our own resources, HCAs.
    type Listed<'a> = (&'a str, &'a str, &'a [&'a str], Option<&'a [&'a str]>);

    fn held(allocations: &[Listed<'_>]) -> Held {
        let texts = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect();
        let one = |(container, resource, units, hcas): &Listed<'_>| Allocation {
            container: (*container).to_owned(),
            resource: (*resource).to_owned(),
            units: texts(units),
            hcas: hcas.map(texts),
            pool: hcas.map(|_| texts(&["0000:3b:00.0", "0000:5e:00.0"])),
        };
        Held {
            pod: "ml/a".into(),
            allocations: allocations.iter().map(one).collect(),
        }
    }

    fn names(devices: &Devices) -> Vec<String> {
        devices.hcas.iter().map(ToString::to_string).collect()
    }

    fn beside(held: &Held, unit: &str) -> Result<Devices, Error> {
        let unit = config::Allocation {
            unit: unit.to_lowercase().parse().unwrap(),
            text: unit.to_owned(),
        };
        held.devices(&unit, None)
    }

    #[test]
    fn all_units_of_the_resource_are_the_pods_devices() {
        let pod = held(&[
            ("a", "rdma/nic", &["0000:5e:00.0"], None),
            ("a", "nvidia.com/gpu", &["GPU-1"], None),
            ("a", "rdma/other", &["0000:99:00.0"], None),
            // A second container's, one of them the same.
            ("b", "rdma/nic", &["0000:3b:00.0", "0000:5e:00.0"], None),
        ]);
        let devices = beside(&pod, "0000:5E:00.0").unwrap();
        assert_eq!(devices.resource, "rdma/nic");
        assert_eq!(names(&devices), ["0000:3b:00.0", "0000:5e:00.0"]);
        assert_eq!(devices.pool, None);
        // Two shares of one HCA are one NIC.
        let shares: &[&str] = &["0000:3b:00.0_3e71787e_1", "0000:3b:00.0_3e71787e_2"];
        let shared = held(&[("a", "rdma/hca", shares, None)]);
        assert_eq!(
            names(&beside(&shared, shares[1]).unwrap()),
            ["0000:3b:00.0"]
        );
    }

    #[test]
    fn the_daemon_says_what_units_stand_for_that_name_no_hca() {
        let unit = "pool_3e71787e_1";
        let both: &[&str] = &["0000:3b:00.0", "0000:5e:00.0"];
        let pod = held(&[("a", "rdma/all", &[unit], Some(both))]);
        let devices = beside(&pod, unit).unwrap();
        assert_eq!(names(&devices), both);
        assert_eq!(devices.pool.unwrap().len(), 2);
        let twice = held(&[
            ("a", "rdma/nic", &["0000:5e:00.0"], None),
            (
                "a",
                "intel.com/nic",
                &["0000:5e:00.0", "0000:3b:00.0"],
                None,
            ),
        ]);
        let error = beside(&twice, "0000:5e:00.0").unwrap_err();
        assert!(
            error.msg.contains("rdma/nic and one of intel.com/nic"),
            "{error}"
        );
        let unknown = held(&[("a", "rdma/all", &[unit], None)]);
        let error = beside(&unknown, unit).unwrap_err();
        assert_eq!(error.code, Code::Unavailable);
        assert!(error.msg.contains("rdma/all"), "{error}");
    }

    #[test]
    fn a_unit_that_the_pod_does_not_have_is_denied() {
        let pod = held(&[("a", "rdma/nic", &["0000:5e:00.0"], None)]);
        for (pod, has) in [(pod, "it has 0000:5e:00.0"), (held(&[]), "it has no unit")] {
            let error = beside(&pod, "0000:3b:00.0").unwrap_err();
            assert_eq!(error.code, Code::Policy);
            assert!(
                error.msg.contains(has) && error.msg.contains("0000:3b:00.0"),
                "{error}"
            );
        }
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
