//! ADD: request → look → plan → journal → act → result.
//!
//! Before the record is in the journal nothing of the host is changed but leases, which the IPAM
//! finds by container and interface. After it, whatever fails is undone by the same function
//! that serves DEL, and the same holds when this process dies.

use std::{fs::File, io::Read};

use cni_wire::{AttachmentId, Cidr, CniResult, Code, Error, Interface, IpConfig, Request};
use hca::MacAddress;
use netlink_packet_route::{
    AddressFamily,
    address::AddressMessage,
    link::{InfoData, InfoIpoib, IpoibMode, MacVlanMode},
};
use serde_json::Value;

use super::{pod_namespace, rdma_only};
use crate::{
    act,
    addresses::{self, Ipam},
    choose::{Chosen, check_rivals, choose},
    config::{Attach, Config},
    detach::{detach, living},
    guard,
    journal::{
        Key, RdmaDevice, Record,
        record::{self, Netns},
    },
    kernel::{
        Namespace, Socket, address,
        link::{self, By, Change, Child, Link},
        route,
    },
    layout::{self, Layout},
    netdev::{
        replay, restore,
        snapshot::{Identity, Message, Snapshot},
        vf::Vf,
    },
    node::{Node, now},
    plan,
    rdma::{self, Wish},
    report::{self, Reported},
};

/// Serves ADD.
///
/// # Errors
/// The first failure; nothing is left then.
pub fn run(mut node: Node, request: &Request) -> Result<Value, Error> {
    let id = request.attachment()?;
    let key = key_of(request, id)?;
    let mut config = Config::read(request)?;
    let mut before = request.config.prev_result()?.unwrap_or_default();
    before
        .check_indexes()
        .map_err(|e| e.context("prevResult"))?;
    let dns = request.config.dns()?;
    let ipam = Ipam::of(&node, request)?;
    if matches!(ipam, Ipam::None) && plan::kind(&config) != plan::Kind::Known(Attach::Move) {
        before.fits(request.config.version)?;
    }
    if config.attach == Some(Attach::RdmaOnly) {
        return rdma_only::add(&mut node, request, &config, &key);
    }
    let inherited = match config.attach {
        Some(Attach::Ipvlan) => inherit(&mut config, &mut before, &ipam)?,
        _ => None,
    };
    let pod = pod_namespace(&node, request)?;
    let mut inside = pod.socket(&node.home)?;
    heal(&mut node, &key, &pod, &mut inside, id)?;
    name_is_free(&mut inside, id, &pod)?;

    let mut chosen = choose(&mut node, &config, &mut inside)?;
    let attach = plan::kind(&config).on(&chosen.found.link);
    if !config.link_in_container {
        guard::check(&chosen.found, attach, &node.policy.allow, &node.policy_path)?;
        check_rivals(&mut node, &chosen.found.link, attach)?;
    }
    let found = &chosen.found;
    let mode = match config.rdma {
        Wish::Required => rdma::mode(&node.host)?,
        Wish::Auto | Wish::Off => found.mode,
    };
    let has_rdma = !found.rdma.is_empty();
    let devices = if rdma::moves(
        config.rdma,
        attach,
        mode,
        has_rdma,
        &found.link.name.to_string(),
    )? {
        rdma::take_down(
            &node,
            &rdma::of_netdev(&node.host, &found.link, &found.rdma)?,
        )?
    } else {
        Vec::new()
    };
    plan::check(
        attach,
        &config,
        &chosen.found.link,
        request.config.ipam_type()?,
    )?;

    let leased = if inherited.is_some() || ipam.needs_the_link() {
        inherited
    } else {
        ipam.add(&node, request)?
    };
    let mut add = Add {
        node: &mut node,
        request,
        id,
        config: &config,
        attach,
        chosen: &chosen,
        pod: &pod,
        inside: &mut inside,
        ipam: &ipam,
    };
    let planned = add.plan(leased, devices).and_then(|planned| {
        add.node.store.create(&key, &planned.record)?;
        Ok(planned)
    });
    let planned = match planned {
        Ok(planned) => planned,
        // Another ADD of the same attachment was quicker; the addresses are its.
        Err(error) if error.code == Code::Exists => return Err(error),
        Err(error) => return Err(ipam.release_after(&node, request, error)),
    };
    let acted = add.act(&key, &planned).and_then(|made| {
        let mut result = before;
        merge(&mut result, made, dns);
        result.to_json(request.config.version)
    });
    acted.map_err(|first| {
        // Detaching takes the netdev's lock itself.
        chosen.lock = None;
        match detach(&mut node, &key, &planned.record, restore::ON_ITS_WAY) {
            Ok(()) => first,
            Err(e) => first.with_details(format!("undoing it failed too: {e}")),
        }
    })
}

/// A chained ipvlan stands on the chain's only interface, unless a master is named, and without
/// an IPAM it takes over the chain's addresses and routes, as the reference plugin does.
///
/// # Errors
/// Code 7: several interfaces could be meant.
fn inherit(
    config: &mut Config,
    before: &mut CniResult,
    ipam: &Ipam,
) -> Result<Option<CniResult>, Error> {
    if config.master.is_none() && config.allocation.is_none() {
        config.master = match before.interfaces.as_slice() {
            [] => None,
            [only] => Some(only.name.clone()),
            several => {
                let names: Vec<&str> = several.iter().map(|i| i.name.as_str()).collect();
                return Err(Error::new(
                    Code::InvalidConfig,
                    format!("prevResult has several interfaces: {}", names.join(", ")),
                )
                .with_details("say with master which one the ipvlan is to stand on"));
            }
        };
    }
    if !matches!(ipam, Ipam::None) || before.ips.is_empty() {
        return Ok(None);
    }
    Ok(Some(CniResult {
        ips: std::mem::take(&mut before.ips),
        routes: std::mem::take(&mut before.routes),
        ..CniResult::default()
    }))
}

/// What an ADD works with once everything is found and allowed.
struct Add<'a> {
    node: &'a mut Node,
    request: &'a Request,
    id: &'a AttachmentId,
    config: &'a Config,
    attach: Attach,
    chosen: &'a Chosen,
    pod: &'a Namespace,
    inside: &'a mut Socket,
    ipam: &'a Ipam,
}

/// What is decided before the journal is written.
struct Planned {
    record: Record,
    child: Option<Child>,
    mac: Option<MacAddress>,
    leased: Option<CniResult>,
    /// None while the addresses are not known, because their IPAM needs the interface first.
    layout: Option<Layout>,
}

impl Add<'_> {
    fn plan(&mut self, leased: Option<CniResult>, rdma: Vec<RdmaDevice>) -> Result<Planned, Error> {
        let link = &self.chosen.found.link;
        let (pkey, mode) = ipoib_of(link);
        let child = plan::child(self.attach, self.config, pkey, mode)?;
        let mac = match &self.config.mac {
            Some(mac) => Some(mac.clone()),
            // Chosen here, so that the journal knows it before the kernel does.
            None if matches!(child, Some(Child::Macvlan { mode, .. }) if mode != MacVlanMode::Passthrough) => {
                Some(random_mac()?)
            }
            None => None,
        };
        let moved = match self.attach {
            Attach::Move => Some(self.take_down()?),
            _ => None,
        };
        let layout = if self.ipam.needs_the_link() {
            None
        } else {
            Some(self.lay_out(moved.as_ref(), leased.as_ref())?)
        };
        let record = Record {
            moved,
            child: child.as_ref().map(|child| record::Child {
                kind: child.word().to_owned(),
                master: link.name.to_string(),
                index: link.index,
                mac: mac.as_ref().map(ToString::to_string),
            }),
            rdma,
            rules: layout
                .iter()
                .flat_map(|l| &l.rules)
                .map(Message::rule)
                .collect(),
            ipam: addresses::note(self.request)?,
            ..blank_record(self.node, self.request, self.pod)?
        };
        Ok(Planned {
            record,
            child,
            mac,
            leased,
            layout,
        })
    }

    fn take_down(&mut self) -> Result<Snapshot, Error> {
        let link = &self.chosen.found.link;
        let mut taken = Snapshot::take(&mut self.node.socket, &self.node.host.proc, link)?;
        taken.identity = Identity::on(&self.node.host, link);
        if let Some(address) = &taken.identity.bus_device {
            taken.vf = Vf::take(&self.node.host, &mut self.node.socket, address)?;
        }
        if let Some(name) = &self.chosen.true_name {
            taken.name.clone_from(name);
        }
        Ok(taken)
    }

    fn lay_out(
        &mut self,
        moved: Option<&Snapshot>,
        leased: Option<&CniResult>,
    ) -> Result<Layout, Error> {
        let mut layout = match moved.filter(|_| leased.is_none()) {
            Some(taken) => {
                Layout::of_host(self.config, taken, self.id.ifname.as_str()).map_err(|e| {
                    Error::new(Code::Internal, format!("read back {}: {e}", taken.name))
                })?
            }
            None => {
                let none = CniResult::default();
                Layout::of_result(self.attach, self.config, leased.unwrap_or(&none))
            }
        };
        self.lay_rails(&mut layout, leased.is_none())?;
        Ok(layout)
    }

    /// Decides about source routing, and keeps the pod's way out where it is.
    fn lay_rails(&mut self, layout: &mut Layout, of_host: bool) -> Result<(), Error> {
        for family in route::FAMILIES {
            if layout.has_default(family) {
                let main = route::list_table(self.inside, family, replay::MAIN)?;
                layout
                    .defaults_of_the_pod
                    .extend(main.iter().any(replay::is_default).then_some(family));
            }
        }
        let rails = &self.config.rails;
        let others = match rails.wanted {
            Some(_) => Vec::new(),
            None => self.families_of_others()?,
        };
        let families = rails.families(layout, &others, &layout.defaults_of_the_pod);
        if !families.is_empty() {
            let ifname = self.id.ifname.as_str();
            let table = rails.table(ifname, &route::tables(self.inside)?)?;
            rails.apply(layout, &families, ifname, table);
        }
        if of_host {
            let stay = layout.defaults_of_the_pod.clone();
            layout.without_defaults(&stay);
        }
        Ok(())
    }

    /// The families of which the pod's other RDMA interfaces have addresses.
    fn families_of_others(&mut self) -> Result<Vec<AddressFamily>, Error> {
        let mut families = Vec::new();
        for (_, _, other) in self.node.store.list()? {
            if other.container_id != self.id.container_id || other.ifname == self.id.ifname {
                continue;
            }
            let Some(link) = link::get(self.inside, By::Name(other.ifname.as_str().as_bytes()))?
            else {
                continue;
            };
            families.extend(
                address::list(self.inside, link.index)?
                    .iter()
                    .filter(|a| !replay::is_link_local(a))
                    .map(|a| a.header.family),
            );
        }
        Ok(families)
    }

    /// Makes the interface and gives it what it is to have. Returns this plugin's own result.
    fn act(&mut self, key: &Key, planned: &Planned) -> Result<CniResult, Error> {
        if let Some(taken) = &planned.record.moved {
            self.node
                .store
                .take(&taken.identity, key, &self.node.boot)?;
        }
        rdma::move_in(self.node, self.pod, &planned.record.rdma)?;
        let new = act::Interface {
            name: self.id.ifname.as_str(),
            attach: self.attach,
            netdev: &self.chosen.found.link,
            child: planned.child.clone(),
            within: self.config.link_in_container,
            mtu: self.config.mtu,
            mac: planned.mac.clone(),
        };
        let ipoib =
            planned.record.moved.as_ref().filter(|_| {
                !planned.record.rdma.is_empty() && self.chosen.found.link.is_infiniband()
            });
        let link = match ipoib {
            Some(taken) => act::take_anew(self.node, self.pod, self.inside, &new, &taken.identity)?,
            None => act::make(self.node, self.pod, self.inside, &new)?,
        };
        let mut made = planned.leased.clone().unwrap_or_default();
        let late = match &planned.layout {
            Some(_) => None,
            None => {
                let what = format!("set {} up", link.name);
                link::change(self.inside, what, link.index, &Change::up())?;
                // What fails from here on is undone with the record, which releases the lease.
                made = self.ipam.add(self.node, self.request)?.unwrap_or_default();
                let late = self.lay_out(None, Some(&made))?;
                if !late.rules.is_empty() {
                    let known = Record {
                        rules: late.rules.iter().map(Message::rule).collect(),
                        ..planned.record.clone()
                    };
                    self.node.store.replace(key, &known)?;
                }
                Some(late)
            }
        };
        let none = Layout::default();
        let layout = planned.layout.as_ref().or(late.as_ref()).unwrap_or(&none);
        let link = self.pod.enter(&self.node.home, || {
            act::configure(
                self.inside,
                &self.node.host.proc,
                &link,
                layout,
                self.attach,
            )
        })??;
        if made.ips.is_empty() {
            made.ips = layout.addresses.iter().filter_map(own_ip).collect();
        }
        // An IPAM does not know our interfaces: every address is of ours.
        for ip in &mut made.ips {
            ip.interface = Some(0);
        }
        layout.tell_defaults(&mut made, self.request.config.version);
        self.report(&made, &planned.record)?;
        made.interfaces = vec![self.interface(&link, planned)];
        Ok(made)
    }

    /// Waits for the addresses' GIDs, and completes the device information file.
    fn report(&self, made: &CniResult, record: &Record) -> Result<(), Error> {
        if self.config.rdma == Wish::Off {
            return Ok(());
        }
        let found = &self.chosen.found;
        let devices = record.rdma.iter().map(|device| device.name.as_str());
        let function = report::function(&found.link, self.config);
        let report = Reported {
            ports: &found.rdma,
            addresses: made.ips.iter().map(|ip| ip.address.addr).collect(),
            moved: devices.collect(),
            pci: function.as_deref(),
        };
        report::tell(self.node, self.pod, self.id, self.config, &report)
    }

    fn interface(&self, link: &Link, planned: &Planned) -> Interface {
        let moved = planned.record.moved.as_ref();
        let on_pci = moved.filter(|taken| taken.bus.as_deref() == Some("pci"));
        Interface {
            name: link.name.to_string(),
            mac: (!link.mac.is_empty()).then(|| MacAddress::new(link.mac.as_slice()).to_string()),
            mtu: Some(link.mtu),
            sandbox: self.request.env.netns.clone(),
            socket_path: None,
            pci_id: on_pci.and_then(|taken| taken.identity.bus_device.clone()),
        }
    }
}

/// A record of the request's attachment that says nothing was made.
pub(super) fn blank_record(
    node: &Node,
    request: &Request,
    pod: &Namespace,
) -> Result<Record, Error> {
    let id = request.attachment()?;
    let netns = pod.id();
    Ok(Record {
        version: record::VERSION,
        network: request.config.name.clone(),
        container_id: id.container_id.to_string(),
        ifname: id.ifname.to_string(),
        pod: pod_name(request),
        created: now(),
        boot: node.boot.clone(),
        netns: Netns {
            path: pod.path().display().to_string(),
            device: netns.device,
            inode: netns.inode,
        },
        moved: None,
        child: None,
        rdma: Vec::new(),
        rules: Vec::new(),
        ipam: None,
    })
}

fn own_ip(message: &AddressMessage) -> Option<IpConfig> {
    let address = Cidr::new(layout::own_address(message)?, message.header.prefix_len)?;
    Some(IpConfig {
        address,
        gateway: None,
        interface: None,
    })
}

fn pod_name(request: &Request) -> Option<String> {
    let args = &request.env.args;
    Some(format!(
        "{}/{}",
        args.get("K8S_POD_NAMESPACE")?,
        args.get("K8S_POD_NAME")?
    ))
}

/// Partition key and mode of an IPoIB link.
fn ipoib_of(link: &Link) -> (u16, IpoibMode) {
    let (mut pkey, mut mode) = (0xffff, IpoibMode::Datagram);
    if let Some(InfoData::Ipoib(infos)) = &link.data {
        for info in infos {
            match info {
                InfoIpoib::Pkey(own) => pkey = *own,
                InfoIpoib::Mode(own) => mode = *own,
                _ => {}
            }
        }
    }
    (pkey, mode)
}

/// A locally administered address nobody else has.
fn random_mac() -> Result<MacAddress, Error> {
    let mut bytes = [0; 6];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|e| Error::new(Code::Io, format!("read /dev/urandom: {e}")))?;
    // IEEE 802: not a group's address, locally administered.
    bytes[0] = bytes[0] & 0xfc | 0x02;
    Ok(MacAddress::new(bytes))
}

/// The journal's name for the attachment.
fn key_of(request: &Request, id: &AttachmentId) -> Result<Key, Error> {
    Key::of(&request.config.name, id).ok_or_else(|| {
        Error::new(
            Code::InvalidConfig,
            format!(
                "name {} is too long to keep a journal under",
                request.config.name
            ),
        )
        .with_details("network name, container ID and interface together have at most 248 bytes")
    })
}

/// Undoes what an ADD that died left under the same name. One that lives is an error.
fn heal(
    node: &mut Node,
    key: &Key,
    pod: &Namespace,
    inside: &mut Socket,
    id: &AttachmentId,
) -> Result<(), Error> {
    let Some(record) = node.store.read(key)? else {
        // A record that was cut off says that nothing was done.
        return Ok(node.store.forget(key)?);
    };
    let same = living(&record)?.is_some_and(|old| old.id() == pod.id());
    if same && link::get(inside, By::Name(id.ifname.as_str().as_bytes()))?.is_some() {
        return Err(Error::new(
            Code::Exists,
            format!("{id} is attached to network {} already", record.network),
        )
        .with_details("the runtime must DEL it first"));
    }
    detach(node, key, &record, restore::ON_ITS_WAY)
        .map_err(|e| e.context(format_args!("undo an earlier attachment of {id}")))
}

fn name_is_free(inside: &mut Socket, id: &AttachmentId, pod: &Namespace) -> Result<(), Error> {
    match link::get(inside, By::Name(id.ifname.as_str().as_bytes()))? {
        None => Ok(()),
        Some(link) => Err(Error::new(
            Code::Exists,
            format!(
                "{} has an interface {} already",
                pod.path().display(),
                id.ifname
            ),
        )
        .with_details(match link.kind {
            Some(kind) => format!("a {kind}; ask for another interface name"),
            None => "ask for another interface name".to_owned(),
        })),
    }
}

/// Ours first where there was nothing before; else behind what other plugins made, whose
/// numbers must not change.
fn merge(result: &mut CniResult, made: CniResult, dns: cni_wire::Dns) {
    let offset = result.interfaces.len();
    result.interfaces.extend(made.interfaces);
    result.ips.extend(made.ips.into_iter().map(|ip| IpConfig {
        interface: ip.interface.map(|index| index + offset),
        ..ip
    }));
    result.routes.extend(made.routes);
    if !dns.is_empty() {
        result.dns = dns;
    } else if !made.dns.is_empty() {
        result.dns = made.dns;
    }
}
