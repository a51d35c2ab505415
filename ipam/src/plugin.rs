//! The verbs of a CNI IPAM plugin, for the binary `rdma-ipam` and, in the same
//! process, for `rdma-netdev`.
//!
//! # Killed at any point
//! Everything that lasts is the store's, and each of its steps can be followed
//! by the owner's next call (see [`crate::store`]): a repeated ADD takes up what
//! the first one left, DEL removes it. An ADD that fails gives back what it took.

mod add;
mod answer;
mod blocks;
mod bounds;
mod holder;

use crate::config::{self, Config};
use crate::lease::{Holder, Lease};
use crate::reclaim;
use crate::store::{Store, StoreError};
use answer::to_error;
use blocks::{BROKER_SOCKET, Broker, Fault};
use cni_wire::{CniResult, Code, Command, Error, Request, Version};
use node::identity::NodeIdentity;
use node::log::{Log, subject};
use node::policy::{Policy, PolicyError};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Serves requests on this node, by its policy.
#[derive(Debug)]
pub struct Plugin {
    policy: Policy,
    fault: Option<PolicyError>,
    root: PathBuf,
    node: String,
    cluster_node: bool,
    log: Log,
}

impl Plugin {
    /// By a policy that was read. `root` is the prefix of `/proc` and `/etc` (`/`
    /// on a live host); `node` the value of `RDMA_NODE_NAME`, if there is one.
    #[must_use]
    pub fn new(policy: Policy, root: &Path, node: Option<&str>) -> Self {
        let by_the_cluster = node.filter(|name| !name.is_empty());
        let node = policy.node_name(node);
        Self {
            cluster_node: by_the_cluster == Some(node.as_str()),
            log: Log::new(&policy.log, "rdma-ipam", ""),
            policy,
            fault: None,
            root: root.to_owned(),
            node,
        }
    }

    /// By the policy file at `path`. One that is wrong stops ADD, CHECK and
    /// STATUS; DEL and GC go by what can be read of it.
    #[must_use]
    pub fn load(path: &Path, root: &Path, node: Option<&str>) -> Self {
        let (policy, fault) = Policy::load_for_release(path);
        Self {
            fault,
            ..Self::new(policy, root, node)
        }
    }

    /// Whichever verb the request has; an ADD's result in its version.
    pub fn serve(&self, request: &Request) -> Result<Option<Value>, Error> {
        let started = Instant::now();
        let answer = match request.command() {
            Command::Add => self.add(request, None).map(|results| {
                let result = results.first();
                result.map(|result| result.to_json(request.config.version))
            }),
            Command::Del => self.del(request).map(|()| None),
            Command::Check => self.check(request, None).map(|()| None),
            Command::Status => self.status(request).map(|()| None),
            Command::Gc => self.gc(request).map(|()| None),
            // Answered before a request is made.
            Command::Version => Ok(Some(Version::document())),
        };
        let micros = started.elapsed().as_micros();
        let log = self.log.about(&subject(request));
        match &answer {
            Ok(None) => log.debug(format_args!("ok, {micros} µs")),
            Ok(Some(document)) => log.debug(format_args!("{document}, {micros} µs")),
            Err(error) => log.failure(request.command(), error),
        }
        answer
    }

    /// ADD: gives one address from each range of `ipam`. The same container and
    /// interface again get the same answer. Interfaces are the caller's to add. Of an attachment
    /// with several, by their `rails`: all addresses by one order, all or none, a result for each.
    ///
    /// # Errors
    /// The specification's codes, and 102 when a range has no free address or a
    /// requested one is held, 105 when the store cannot be used. Nothing stays leased.
    pub fn add(&self, request: &Request, rails: Option<&[u32]>) -> Result<Vec<CniResult>, Error> {
        let config = self.config_of(request, rails)?;
        if config.rails().is_some() {
            return Err(Error::new(
                Code::InvalidConfig,
                "ipam.ranges has ranges of rails, and the rail of the interface is unknown",
            )
            .with_details(
                "set rail, or devices to all, in a network of rdma-netdev; or use range and ipRanges",
            ));
        }
        let store = self.open(&config.store)?;
        self.warn(request, &config, &store);
        let holder = self.holder(request, store.node())?;
        let request_excluded = self.policy.allow.request_excluded;
        let broker = self.broker();
        let all = add::add(request, &config, &store, &broker, &holder, request_excluded)?;
        Ok(match rails {
            Some(rails) => add::by_interface(&config, all, rails.len()),
            None => vec![all],
        })
    }

    fn config_of(&self, request: &Request, rails: Option<&[u32]>) -> Result<Config, Error> {
        let config = self.config(request)?;
        match rails {
            Some(rails) => config.for_rails(rails),
            None => Ok(config),
        }
    }

    /// The rails for which a request's configuration has ranges; none where all have the same.
    pub fn rails(&self, request: &Request) -> Result<Option<BTreeSet<u32>>, Error> {
        Ok(self.config(request)?.rails())
    }

    /// Which interface of an attachment with one on each of these rails has the address of each range,
    /// by the number of its lease.
    ///
    /// # Errors
    /// As [`Plugin::add`].
    pub fn positions(&self, request: &Request, rails: &[u32]) -> Result<Vec<usize>, Error> {
        let config = self.config_of(request, Some(rails))?;
        Ok(config.places.iter().map(|place| place.interface).collect())
    }

    /// DEL: frees every address that the container's interface has of this network. Needs nothing of
    /// the configuration but the names of network and store; what is gone already is not an error. What
    /// the policy's store does not have is freed in those that this node used before under the
    /// name.
    ///
    /// # Errors
    /// Code 105, or 11 where another try may help: the lease is still there, or the policy cannot be
    /// read and no lease was found where it may be.
    pub fn del(&self, request: &Request) -> Result<(), Error> {
        let id = request.attachment()?;
        let name = config::store_name(&request.config);
        let log = self.log.about(&subject(request));
        let release = |store: &Store| -> Result<bool, Error> {
            let (freed, strange) = store
                .give_back(
                    id.container_id.as_str(),
                    id.ifname.as_str(),
                    &request.config.name,
                )
                .map_err(|e| to_error(&e, format_args!("free the addresses of {id}")))?;
            for record in strange {
                log.warn(format_args!(
                    "free the addresses of {id}: {record}; see rdmactl addresses fsck"
                ));
            }
            Ok(!freed.is_empty())
        };
        let current = self.open_existing(&name)?;
        if let Some(store) = &current
            && release(store)?
        {
            return Ok(());
        }
        let node = self.identity()?;
        let mut used = current.is_some();
        let mut unreachable = None;
        for store in Store::open_remembered(&self.policy, &name, &node) {
            match store {
                Ok(store) => {
                    used = true;
                    if release(&store)? {
                        return Ok(());
                    }
                }
                Err(e) => {
                    log.warn(format_args!(
                        "free the addresses of {id}: a previous store {name:?}: {e}"
                    ));
                    unreachable = unreachable.or(Some(e));
                }
            }
        }
        // None of those that this node used could be asked.
        if let Some(e) = unreachable.filter(|_| !used) {
            return Err(to_error(&e, format_args!("free the addresses of {id}")));
        }
        match &self.fault {
            Some(fault) => Err(Error::new(
                Code::TryAgain,
                format!("free the addresses of {id}: nothing was found to free: {fault}"),
            )
            .with_details(fault.remedy())),
            None => Ok(()),
        }
    }

    /// CHECK: the leases are there and are those of `prevResult`; of an attachment with several
    /// interfaces, by their rails.
    ///
    /// # Errors
    /// Code 7 without `prevResult`, 104 when they differ, 105 when the store
    /// cannot be used.
    pub fn check(&self, request: &Request, rails: Option<&[u32]>) -> Result<(), Error> {
        let config = self.config_of(request, rails)?;
        let previous = request.config.prev_result()?.ok_or_else(|| {
            Error::new(Code::InvalidConfig, "CHECK without prevResult")
                .with_details("the runtime passes the result of ADD")
        })?;
        let store = self.open(&config.store)?;
        let id = request.attachment()?;
        let mut held = store
            .held(id.container_id.as_str(), id.ifname.as_str())
            .map_err(|e| to_error(&e, format_args!("find the addresses of {id}")))?;
        for range in &config.ranges {
            let of_range = |lease: &Lease| {
                lease.range == range.subnet() && lease.holder.network == request.config.name
            };
            // Several interfaces may have addresses of one range: each has its own.
            let Some(lease) = held.iter().position(of_range).map(|n| held.remove(n)) else {
                return Err(Error::new(
                    Code::Differs,
                    format!("{id} holds no address of {}", range.subnet()),
                )
                .with_details("DEL and ADD the container again"));
            };
            if !previous
                .ips
                .iter()
                .any(|ip| ip.address.ip() == lease.address)
            {
                return Err(Error::new(
                    Code::Differs,
                    format!(
                        "{id} holds {}, which prevResult does not have",
                        lease.address
                    ),
                ));
            }
        }
        Ok(())
    }

    /// STATUS: ADD could be served.
    pub fn status(&self, request: &Request) -> Result<(), Error> {
        let unavailable = |error: Error| Error {
            code: Code::Unavailable,
            ..error
        };
        let config = self
            .config(request)
            .and_then(|config| config.for_all_rails());
        let config = config.map_err(unavailable)?;
        let store = self.open(&config.store).map_err(unavailable)?;
        let at = format!("use store {:?}", config.store);
        store
            .check_writable()
            .map_err(|e| unavailable(to_error(&e, &at)))?;
        let holder = self.anybody(request, store.node());
        let order = add::order(&config, &holder, &[]);
        self.broker()
            .supply(|| store.room(&order))
            .map_err(|fault| match fault {
                Fault::Store(refused) => unavailable(to_error(&refused.error, &at)),
                Fault::Broker(error) => unavailable(error),
            })
    }

    /// GC: frees this node's leases of the network that are not in the list of
    /// valid attachments. Without a list nothing is freed.
    ///
    /// # Errors
    /// Code 105 with what could not be freed; everything else was.
    pub fn gc(&self, request: &Request) -> Result<(), Error> {
        let Some(valid) = request.config.valid_attachments()? else {
            return Ok(());
        };
        let name = config::store_name(&request.config);
        let Some(store) = self.open_existing(&name)? else {
            return Ok(());
        };
        let network = &request.config.name;
        let listed = |holder: &Holder| {
            valid.iter().any(|id| {
                id.container_id.as_str() == holder.container
                    && id.ifname.as_str() == holder.interface
            })
        };
        let attempt = format!("collect garbage of network {network}");
        let report =
            reclaim::keep_only(&store, network, &listed).map_err(|e| to_error(&e, &attempt))?;
        if report.failed.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            Code::State,
            format!("{attempt}: {}", report.failed.join("; ")),
        )
        .with_details(format!("{} leases were freed", report.freed.len())))
    }

    /// Opens a store of the policy, made if it is new.
    pub fn open(&self, name: &str) -> Result<Store, Error> {
        self.trusted_policy()?;
        let node = self.identity()?;
        Store::open(&self.policy, name, node, &self.root)
            .map_err(|e| to_error(&e, format_args!("open store {name:?}")))
    }

    /// Makes a directory of the policy a store, if it is none yet.
    pub fn init(&self, name: &str) -> Result<Store, Error> {
        self.trusted_policy()?;
        let node = self.identity()?;
        Store::init(&self.policy, name, node, &self.root)
            .map_err(|e| to_error(&e, format_args!("make store {name:?}")))
    }

    /// Opens a store of the policy if it is there.
    ///
    /// # Errors
    /// When it may be there, but cannot be reached.
    pub fn open_existing(&self, name: &str) -> Result<Option<Store>, Error> {
        let node = self.identity()?;
        match Store::open_existing(&self.policy, name, node) {
            // Nothing can have been leased in a store that is not configured.
            Err(StoreError::Unknown { .. }) => Ok(None),
            other => other.map_err(|e| to_error(&e, format_args!("open store {name:?}"))),
        }
    }

    fn broker(&self) -> Broker {
        Broker {
            socket: self.root.join(BROKER_SOCKET),
        }
    }

    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    fn trusted_policy(&self) -> Result<(), Error> {
        match &self.fault {
            None => Ok(()),
            Some(fault) => {
                Err(Error::new(Code::Policy, fault.to_string()).with_details(fault.remedy()))
            }
        }
    }

    /// Whether this node's name is the one that the cluster gave it (`RDMA_NODE_NAME`):
    /// no two machines have it at a time.
    #[must_use]
    pub fn is_cluster_node(&self) -> bool {
        self.cluster_node
    }

    /// This machine, as leases name it.
    ///
    /// # Errors
    /// Code 105: no boot ID, or a name that cannot be used.
    pub fn identity(&self) -> Result<NodeIdentity, Error> {
        NodeIdentity::read(&self.root, &self.node)
            .map_err(|e| to_error(&e.into(), "identify this node"))
    }

    fn warn(&self, request: &Request, config: &Config, store: &Store) {
        let log = self.log.about(&subject(request));
        for warning in store.warnings() {
            log.warn(format_args!("store {:?}: {warning}", config.store));
        }
        if !config.ignored.is_empty() {
            let keys = config.ignored.join(", ");
            log.warn(format_args!(
                "ignored: {keys}; leases are where the node's policy says"
            ));
        }
    }
}
