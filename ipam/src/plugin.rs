//! The verbs of a CNI IPAM plugin, for the binary `rdma-ipam` and, in the same
//! process, for `rdma-netdev`.
//!
//! # Killed at any point
//! Everything that lasts is in the node's leases (see [`crate::leases`]): a repeated ADD begins anew what
//! the first one left, DEL removes it. An ADD that fails gives back what it took.

mod add;
mod bounds;
mod holder;
mod supply;

pub use supply::AGENT_SOCKET;

use crate::config::Config;
use crate::lease::{Holder, Lease};
use crate::leases::{LeaseError, Leases, since_boot};
use crate::owned::Owned;
use crate::reclaim;
use add::Rules;
use cni_wire::{CniResult, Code, Command, Error, Request, Version};
use node::identity::{IdentityError, boot_id, is_name};
use node::log::{Log, subject};
use node::policy::{Policy, PolicyError, Profile, StoreKind};
use rustix::io::Errno;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use supply::Supply;

/// Serves requests on this node, by its policy.
#[derive(Debug)]
pub struct Plugin {
    policy: Policy,
    fault: Option<PolicyError>,
    root: PathBuf,
    node: String,
    log: Log,
    /// How old this boot was when the call began: what GC frees is older.
    began: Duration,
}

impl Plugin {
    /// By a policy that was read. `root` is the prefix of the host's `/proc` and `/run` (`/`
    /// on a live host); `node` the value of `RDMA_NODE_NAME`, if there is one.
    #[must_use]
    pub fn new(policy: Policy, root: &Path, node: Option<&str>) -> Self {
        Self {
            node: policy.node_name(node),
            log: Log::new(&policy.log, "rdma-ipam", ""),
            policy,
            fault: None,
            root: root.to_owned(),
            began: since_boot(),
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
        let at = || format!("use store {:?}", config.store);
        let supply = Supply::of(&self.policy, &config.store, &self.root);
        let supply = supply.map_err(|e| to_error(&e, at()))?;
        self.warn(request, &config);
        let leases = self.leases()?;
        let holder = self.holder(request)?;
        let mut of_host = BTreeSet::new();
        let rules = self.rules();
        let all = add::add(
            request,
            &config,
            &leases,
            &supply,
            &holder,
            rules,
            &mut of_host,
        )?;
        if config.profile == Profile::Compatible && !of_host.is_empty() {
            self.log.about(&subject(request)).warn(format_args!(
                "profile compatible: not leased, as addresses of this node: {}",
                cni_wire::text::list(&of_host)
            ));
        }
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
    /// the configuration but the name of the network, and nothing of the policy; what is gone already is
    /// not an error.
    ///
    /// # Errors
    /// Code 105, or 11 where another try may help: the lease is still there.
    pub fn del(&self, request: &Request) -> Result<(), Error> {
        let id = request.attachment()?;
        let attempt = || format!("free the addresses of {id}");
        let container = id.container_id.as_str();
        let (Some(leases), true) = (
            self.leases_if_any()?,
            container.len() <= MAX_CONTAINER_BYTES,
        ) else {
            return Ok(());
        };
        leases
            .release(
                container,
                id.ifname.as_str(),
                &request.config.name,
                self.policy.ipam.cooldown,
            )
            .map(drop)
            .map_err(|e| to_error(&e, attempt()))
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
        let id = request.attachment()?;
        let held = |leases: Leases| leases.held(id.container_id.as_str(), id.ifname.as_str());
        let mut held = self
            .leases_if_any()?
            .map_or(Ok(Vec::new()), held)
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
        let at = || format!("use store {:?}", config.store);
        let failed = |e: LeaseError| unavailable(to_error(&e, at()));
        let supply = Supply::of(&self.policy, &config.store, &self.root).map_err(failed)?;
        let leases = self.leases_if_any().map_err(unavailable)?;
        let holder = self.anybody(request);
        let order = add::order(&config, &holder, &[], self.rules().cooldown);
        supply.check(&order, leases.as_ref()).map_err(failed)
    }

    /// GC: frees this node's leases of the network that are not in the list of
    /// valid attachments, and are older than this plugin: its caller may have ended attachments since,
    /// while an ADD began. Without a list nothing is freed.
    ///
    /// # Errors
    /// Code 105 with what could not be freed; everything else was.
    pub fn gc(&self, request: &Request) -> Result<(), Error> {
        let Some(valid) = request.config.valid_attachments()? else {
            return Ok(());
        };
        let Some(leases) = self.leases_if_any()? else {
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
        let cooldown = self.policy.ipam.cooldown;
        let report = reclaim::keep_only(&leases, network, &listed, self.began, cooldown)
            .map_err(|e| to_error(&e, &attempt))?;
        if report.failed.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            Code::State,
            format!("{attempt}: {}", report.failed.join("; ")),
        )
        .with_details(format!("{} leases were freed", report.freed.len())))
    }

    /// The leases of this node; their directory is made where it is missing.
    fn leases(&self) -> Result<Leases, Error> {
        let leases = Leases::open(&self.root, &self.boot()?);
        leases.map_err(|e| to_error(&e, "open the leases of this node"))
    }

    /// The same; none where there were none in this boot.
    ///
    /// # Errors
    /// Code 105: they cannot be opened, or there is no boot ID.
    pub fn leases_if_any(&self) -> Result<Option<Leases>, Error> {
        let leases = Leases::open_existing(&self.root, &self.boot()?);
        leases.map_err(|e| to_error(&e, "open the leases of this node"))
    }

    /// Whether this node may lease an address, by what it owns; of a store that it has alone, or that the
    /// policy does not name, any.
    ///
    /// # Errors
    /// What it owns cannot be read.
    pub fn owns(&self, leases: &[Lease]) -> Result<impl Fn(&Lease) -> bool, LeaseError> {
        let boot = boot_id(&self.root.join("proc"));
        let mut owned: BTreeMap<(String, Option<String>), Owned> = BTreeMap::new();
        for lease in leases {
            let kind = self
                .policy
                .stores
                .get(&lease.store)
                .map(|store| &store.kind);
            let key = (lease.store.clone(), lease.network_name.clone());
            if matches!(kind, None | Some(StoreKind::Node)) || owned.contains_key(&key) {
                continue;
            }
            let space = crate::space::AddressSpace::new(&key.0, key.1.as_deref());
            owned.insert(key, Owned::read(&self.policy.state_dir, &space)?);
        }
        let node = self.node.clone();
        Ok(move |lease: &Lease| {
            let key = (lease.store.clone(), lease.network_name.clone());
            let owned = owned.get(&key);
            owned.is_none_or(|owned| owned.covers(lease.address, &node, &boot))
        })
    }

    fn rules(&self) -> Rules {
        Rules {
            request_excluded: self.policy.allow.request_excluded,
            cooldown: self.policy.ipam.cooldown,
        }
    }

    /// This boot, in which leases are made.
    fn boot(&self) -> Result<String, Error> {
        let failed = |error: IdentityError| to_error(&error.into(), "identify this node");
        if !is_name(&self.node) {
            return Err(failed(IdentityError::Name(self.node.clone())));
        }
        let proc = self.root.join("proc");
        match boot_id(&proc) {
            boot if boot.is_empty() => Err(failed(IdentityError::Boot {
                path: proc,
                source: std::io::ErrorKind::NotFound.into(),
            })),
            boot => Ok(boot),
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

    /// This node's name.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }

    fn warn(&self, request: &Request, config: &Config) {
        let log = self.log.about(&subject(request));
        for note in &config.notes {
            log.warn(format_args!("profile compatible: {note}"));
        }
        if !config.ignored.is_empty() {
            let keys = config.ignored.join(", ");
            log.warn(format_args!(
                "ignored: {keys}; leases are where the node's policy says"
            ));
        }
    }
}

/// A longer container ID is refused by ADD: with the interface it names a file.
const MAX_CONTAINER_BYTES: usize = 200;

/// The CNI error for what failed, with what was attempted and what to do.
pub(crate) fn to_error(error: &LeaseError, attempt: impl Display) -> Error {
    Error::new(code(error), format!("{attempt}: {error}")).with_details(error.remedy())
}

fn code(error: &LeaseError) -> Code {
    match error {
        LeaseError::Io { source, .. } => match *source {
            Errno::AGAIN | Errno::INTR | Errno::NFILE | Errno::MFILE => Code::TryAgain,
            _ => Code::State,
        },
        LeaseError::Locked { .. } | LeaseError::NeedsRoom(_) | LeaseError::Overtaken { .. } => {
            Code::TryAgain
        }
        LeaseError::UnknownStore { .. } => Code::Policy,
        LeaseError::Held { .. }
        | LeaseError::OfThisNode { .. }
        | LeaseError::OtherNetwork { .. }
        | LeaseError::Exhausted { .. } => Code::Exhausted,
        LeaseError::Oversize { .. } => Code::InvalidConfig,
        LeaseError::Untrusted(_)
        | LeaseError::Owned(_)
        | LeaseError::NotARecord { .. }
        | LeaseError::Node(_) => Code::State,
    }
}
