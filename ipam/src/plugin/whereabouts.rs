//! The verbs on a store whose leases are whereabouts' objects: the node's broker writes them, and
//! each verb is one question to it. Nothing of such a store is on the node, so a verb that has no
//! answer has done nothing here, and the next one finds what the broker did.

use super::add;
use super::blocks::TIMEOUT;
use crate::config::{Config, Requested};
use crate::range::Range;
use crate::whereabouts::{self, Unrecordable};
use cni_wire::{AttachmentId as CniAttachment, Cidr, CniResult, Code, Error, Request};
use ipnetwork::IpNetwork;
use node_wire::client::{self, ClientError};
use node_wire::{
    AddressAction, AddressQuestion, AttachmentId, FailureKind, Holding, RangeWanted, Taking,
};
use std::fmt::Display;
use std::net::IpAddr;
use std::path::PathBuf;

/// A store of whereabouts' objects, by way of the broker.
#[derive(Debug)]
pub(super) struct Objects {
    /// The broker's socket.
    pub(super) socket: PathBuf,
    /// The store's name.
    pub(super) store: String,
    /// Where the objects are, for messages.
    pub(super) namespace: String,
    /// `name` of the network configuration.
    pub(super) network: String,
}

impl Objects {
    /// Takes one address of each range.
    pub(super) fn add(
        &self,
        request: &Request,
        config: &Config,
        request_excluded: bool,
    ) -> Result<CniResult, Error> {
        self.check_recordable(config)?;
        let id = request.attachment()?;
        let pod = pod_reference(request)?;
        let requested = Requested::read(request, config.profile)?;
        let asked = add::assign(&requested.instead, config, request_excluded)?;
        let wanted = config.ranges.iter().zip(asked);
        let wanted = wanted.map(|(range, address)| wanted_of(range, address));
        let ranges = wanted
            .collect::<Result<Vec<_>, _>>()
            .map_err(|why| self.refused(&why))?;
        let attempt = format!("lease addresses of {} for {pod}", list(&config.ranges));
        let action = AddressAction::Take(Taking {
            attachment: attachment(id),
            pod,
            network_name: config.network_name.clone(),
            ranges,
        });
        let addresses = self.ask(action, &attempt)?;
        if addresses.len() != config.ranges.len() {
            let why = format!("{attempt}: the broker answered with {addresses:?}");
            return Err(
                Error::new(Code::TryAgain, why).with_details("install all programs of one release")
            );
        }
        let leased = addresses.iter().zip(&config.ranges);
        let leased = leased.map(|(address, range)| Cidr {
            addr: *address,
            prefix: range.subnet().prefix(),
        });
        Ok(add::result(config, leased, requested))
    }

    /// Frees what the attachment has; whether that was anything. `config` may be unknown: then all
    /// pools are searched.
    pub(super) fn free(&self, request: &Request, config: Option<&Config>) -> Result<bool, Error> {
        let id = request.attachment()?;
        let holding = holding(id, config);
        let freed = self.ask(
            AddressAction::Free(holding),
            &format!("free the addresses of {id}"),
        )?;
        Ok(!freed.is_empty())
    }

    /// The attachment has an address of each range, and it is one of `prevResult`.
    pub(super) fn check(
        &self,
        request: &Request,
        config: &Config,
        previous: &CniResult,
    ) -> Result<(), Error> {
        let id = request.attachment()?;
        let action = AddressAction::Find(holding(id, Some(config)));
        let held = self.ask(action, &format!("find the addresses of {id}"))?;
        let differs = |why: String| {
            Err(Error::new(Code::Differs, why).with_details("DEL and ADD the container again"))
        };
        for range in &config.ranges {
            let subnet = range.subnet();
            let Some(address) = held.iter().find(|address| subnet.contains(**address)) else {
                return differs(format!("{id} holds no address of {subnet}"));
            };
            if !previous.ips.iter().any(|ip| ip.address.addr == *address) {
                return differs(format!(
                    "{id} holds {address}, which prevResult does not have"
                ));
            }
        }
        Ok(())
    }

    /// ADD could be served.
    pub(super) fn status(&self, config: &Config) -> Result<(), Error> {
        self.check_recordable(config)?;
        let attempt = format!("use store {:?}", self.store);
        self.ask(AddressAction::Probe, &attempt).map(drop)
    }

    /// Frees what this node took for the network and what none of `valid` has.
    pub(super) fn keep_only(&self, valid: &[CniAttachment]) -> Result<(), Error> {
        let attempt = format!("collect garbage of network {}", self.network);
        let valid = valid.iter().map(attachment).collect();
        self.ask(AddressAction::KeepOnly(valid), &attempt).map(drop)
    }

    fn check_recordable(&self, config: &Config) -> Result<(), Error> {
        let ranges: Vec<IpNetwork> = config.ranges.iter().map(Range::subnet).collect();
        let name = config.network_name.as_deref();
        whereabouts::check(&ranges, name, config.overlapping, config.sliced)
            .map_err(|why| self.refused(&why))
    }

    fn refused(&self, why: &Unrecordable) -> Error {
        let store = &self.store;
        let message = format!("store {store:?} records leases in whereabouts' objects: {why}");
        Error::new(Code::InvalidConfig, message).with_details(why.remedy())
    }

    fn ask(&self, action: AddressAction, attempt: &dyn Display) -> Result<Vec<IpAddr>, Error> {
        let question = AddressQuestion {
            store: self.store.clone(),
            network: self.network.clone(),
            action,
        };
        client::addresses(&self.socket, &question, TIMEOUT)
            .map(|answer| answer.addresses)
            .map_err(|error| self.unanswered(&error, attempt))
    }

    fn unanswered(&self, error: &ClientError, attempt: &dyn Display) -> Error {
        let namespace = &self.namespace;
        let (code, remedy) = match (error, error.failure().map(|failure| failure.kind)) {
            (_, Some(FailureKind::Exhausted)) => (
                Code::Exhausted,
                format!("see kubectl -n {namespace} get ippools -o yaml; enlarge the range"),
            ),
            (_, Some(FailureKind::HeldByAnotherNode)) => (
                Code::Exhausted,
                "ask for another address, or for none".to_owned(),
            ),
            (_, Some(FailureKind::Mismatch)) => (
                Code::Policy,
                "make the node's policy, the network and the objects agree".to_owned(),
            ),
            (ClientError::QuestionTooLarge { .. }, _) => (
                Code::InvalidConfig,
                "shorten the list in exclude".to_owned(),
            ),
            _ => (
                Code::TryAgain,
                "the runtime tries again; if it goes on: kubectl -n kube-system logs \
                 ds/rdma-device-plugin -c rdma-ipam-broker on this node"
                    .to_owned(),
            ),
        };
        Error::new(code, format!("{attempt}: {error}")).with_details(remedy)
    }
}

fn wanted_of(range: &Range, address: Option<IpAddr>) -> Result<RangeWanted, Unrecordable> {
    let subnet = range.subnet();
    if let Some(address) = address {
        whereabouts::offset(subnet, address)?;
    }
    let spans = range.spans().iter();
    let spans = spans.map(|span| span.addresses(subnet.is_ipv4())).collect();
    Ok(RangeWanted {
        range: subnet.to_string(),
        spans,
        address,
    })
}

fn holding(id: &CniAttachment, config: Option<&Config>) -> Holding {
    let ranges = config
        .map(|config| config.ranges.as_slice())
        .unwrap_or_default();
    Holding {
        attachment: attachment(id),
        network_name: config.and_then(|config| config.network_name.clone()),
        ranges: ranges
            .iter()
            .map(|range| range.subnet().to_string())
            .collect(),
    }
}

fn attachment(id: &CniAttachment) -> AttachmentId {
    AttachmentId {
        container: id.container_id.as_str().to_owned(),
        interface: id.ifname.as_str().to_owned(),
    }
}

/// As whereabouts writes it: by this a repeated ADD finds its address, and its reconciler the pod.
fn pod_reference(request: &Request) -> Result<String, Error> {
    match super::pod(request)? {
        Some(pod) if !pod.namespace.is_empty() && !pod.name.is_empty() => {
            Ok(format!("{}/{}", pod.namespace, pod.name))
        }
        _ => Err(Error::new(
            Code::InvalidEnvironment,
            "CNI_ARGS names no pod, and whereabouts' objects name pods",
        )
        .with_details(
            "the runtime passes K8S_POD_NAMESPACE and K8S_POD_NAME; without them use a store of type file",
        )),
    }
}

fn list(ranges: &[Range]) -> String {
    let ranges: Vec<String> = ranges
        .iter()
        .map(|range| range.subnet().to_string())
        .collect();
    ranges.join(", ")
}
