//! ADD: all addresses of an attachment, or none.
//!
//! An attempt under the lock looks into one directory for each address. Where that shows none, the
//! range is searched without the lock, and another attempt looks where the search found room.

use super::decide::{Cooling, Hot, Shown, subnets, usable};
use super::name::{self, LeaseSpace, Subnet};
use super::ranges::Ranges;
use super::{ASIDE, LeaseError, Leases, Need, RECORDS, RecordFile, since_boot};
use crate::lease::{self, Holder, Lease, Record};
use crate::owned::Owned;
use crate::range::{Range, bits, from_bits};
use crate::space::AddressSpace;
use node::policy::Profile;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

/// The addresses that one attachment is to have. Plain data.
#[derive(Debug, Clone)]
pub struct Order {
    pub holder: Holder,
    pub profile: Profile,
    /// Whom the addresses are unique among.
    pub space: AddressSpace,
    /// `enable_overlapping_ranges`: unique in all ranges of the space, not in each.
    pub overlapping: bool,
    /// One address each, in the order of the answer.
    pub requests: Vec<AddressRequest>,
    /// How long freed addresses cool down.
    pub cooldown: Duration,
}

/// One address of an order.
#[derive(Debug, Clone)]
pub struct AddressRequest {
    /// Which addresses may be given.
    pub range: Range,
    /// The earlier request whose address has the host number that this one's is to have, too, if that
    /// is free.
    pub same_host_number_as: Option<usize>,
    /// The one address that may be given.
    pub requested: Option<IpAddr>,
}

/// Which addresses this node may lease.
#[derive(Debug, Clone, Copy)]
pub enum Ownership<'p> {
    /// All that it is asked for.
    All,
    /// Those of its parts, by the files in the policy's `stateDir`.
    Parts {
        state_dir: &'p Path,
        /// Whether an address that cools down is leased before another part is asked for.
        last_resort: bool,
    },
}

#[derive(Debug)]
pub struct Refused {
    /// The request that could not be served, by its number in the order.
    pub request: Option<usize>,
    pub error: LeaseError,
}

impl From<LeaseError> for Refused {
    fn from(error: LeaseError) -> Self {
        Self {
            request: None,
            error,
        }
    }
}

/// How often others may take what was found free.
const MAX_ATTEMPTS: usize = 64;

impl Order {
    /// What is needed where this node owns nothing.
    pub(crate) fn needs(&self) -> Vec<Need> {
        let requests = self.requests.iter();
        let need = |request: &AddressRequest| Need {
            range: request.range.clone(),
            address: request.requested,
            count: 1,
        };
        requests.map(need).collect()
    }

    fn space_of(&self, request: &AddressRequest) -> LeaseSpace {
        LeaseSpace::of(&self.space, &request.range, self.overlapping)
    }

    /// Whether a record is what this order asks for.
    fn is_answered_by(&self, record: &Record) -> bool {
        let (before, now) = (record.holder(), &self.holder);
        let same_place = (&before.netns, before.netns_inode) == (&now.netns, now.netns_inode);
        let leases = record.leases();
        before.network == now.network
            && (before.netns.is_none() || same_place)
            && leases.len() == self.requests.len()
            && self.requests.iter().zip(leases).all(|(request, lease)| {
                LeaseSpace::of_lease(lease) == self.space_of(request)
                    && request.is_answered_by(lease, self.profile)
            })
    }

    fn lease(&self, part: usize, request: &AddressRequest, address: IpAddr) -> Lease {
        Lease {
            address,
            prefix: request.range.prefix(),
            range: request.range.subnet(),
            store: self.space.store.clone(),
            network_name: self.space.network_name.clone(),
            overlapping: self.overlapping,
            requested: request.requested.is_some(),
            part,
            holder: self.holder.clone(),
            created: jiff::Timestamp::now(),
        }
    }
}

impl AddressRequest {
    fn is_answered_by(&self, lease: &Lease, profile: Profile) -> bool {
        lease.range == self.range.subnet()
            && match self.requested {
                Some(address) => lease.address == address,
                // whereabouts keeps an address that its range has shrunk away from.
                None => profile == Profile::Compatible || self.range.gives(lease.address),
            }
    }
}

/// An address that was chosen, and the mark that it was freed.
struct Chosen {
    lease: Lease,
    mark: Option<Duration>,
}

/// Where a range is looked at next.
#[derive(Debug, Clone, Copy)]
struct Place {
    subnet: Subnet,
    cooling: Cooling,
}

/// A call, over its attempts.
struct Taking<'a> {
    leases: &'a Leases,
    order: &'a Order,
    ownership: &'a Ownership<'a>,
    /// Where the search for each request found room.
    places: Vec<Option<Place>>,
    /// Addresses of the host.
    host: BTreeSet<IpAddr>,
}

/// What an attempt came to.
enum Attempt {
    Taken(Vec<Lease>),
    /// The requests for which nothing is free where it looked, and what it would lease for the others.
    Full(Vec<usize>, Vec<Lease>),
}

/// What one attempt has read.
#[derive(Default)]
struct View {
    subnets: BTreeMap<(LeaseSpace, Subnet), Shown>,
    ranges: BTreeMap<LeaseSpace, Ranges>,
}

impl Leases {
    /// Leases an address for each request, by one record. An attachment that has what it asks for
    /// gets it again; what else it has is freed.
    ///
    /// # Errors
    /// [`Refused`]. Nothing that was taken now is left.
    pub fn take(&self, order: &Order, ownership: &Ownership<'_>) -> Result<Vec<Lease>, Refused> {
        self.take_noting(order, ownership, &mut BTreeSet::new())
    }

    /// The same; addresses of the host that were passed over go into `of_host`.
    ///
    /// # Errors
    /// As [`Leases::take`].
    pub fn take_noting(
        &self,
        order: &Order,
        ownership: &Ownership<'_>,
        of_host: &mut BTreeSet<IpAddr>,
    ) -> Result<Vec<Lease>, Refused> {
        let mut taking = Taking {
            leases: self,
            order,
            ownership,
            places: vec![None; order.requests.len()],
            host: BTreeSet::new(),
        };
        let mut full = None;
        for _ in 0..MAX_ATTEMPTS {
            let attempt = {
                let _lock = self.lock()?;
                taking.attempt()?
            };
            match attempt {
                Attempt::Taken(leases) => {
                    of_host.append(&mut taking.host);
                    return Ok(leases);
                }
                Attempt::Full(requests, chosen) => {
                    taking.search(&requests, &chosen)?;
                    full = requests.first().copied();
                }
            }
        }
        let range = full.and_then(|number| order.requests.get(number));
        Err(Refused {
            request: full,
            error: LeaseError::Overtaken {
                range: range.map_or_else(String::new, |of| of.range.subnet().to_string()),
            },
        })
    }

    /// Whether [`Leases::take`] would find an address for each request now. Takes no lock, changes
    /// nothing.
    ///
    /// # Errors
    /// As [`Leases::take`].
    pub fn has_room(&self, order: &Order, ownership: &Ownership<'_>) -> Result<(), Refused> {
        let mut taking = Taking {
            leases: self,
            order,
            ownership,
            places: vec![None; order.requests.len()],
            host: BTreeSet::new(),
        };
        for _ in 0..=order.requests.len() {
            match taking.choose_all()? {
                (full, chosen, _) if full.is_empty() => {
                    debug_assert_eq!(chosen.len(), order.requests.len());
                    return Ok(());
                }
                (full, chosen, _) => {
                    let chosen: Vec<Lease> = chosen.into_iter().map(|of| of.lease).collect();
                    taking.search(&full, &chosen)?;
                }
            }
        }
        Ok(())
    }
}

impl<'a> Taking<'a> {
    fn hot(&self) -> Hot {
        Hot {
            now: since_boot(),
            cooldown: self.order.cooldown,
        }
    }

    /// What of a range this node may lease.
    fn cut(&self, range: &'a Range) -> Result<Cow<'a, Range>, LeaseError> {
        Ok(match self.owned()? {
            None => Cow::Borrowed(range),
            Some(owned) => Cow::Owned(owned.cut(range, &self.order.holder.node, &self.leases.boot)),
        })
    }

    fn owned(&self) -> Result<Option<Owned>, LeaseError> {
        match self.ownership {
            Ownership::All => Ok(None),
            Ownership::Parts { state_dir, .. } => {
                Ok(Some(Owned::read(state_dir, &self.order.space)?))
            }
        }
    }

    /// Call with the lock.
    fn attempt(&mut self) -> Result<Attempt, Refused> {
        let holder = &self.order.holder;
        let name = name::record(&holder.container, &holder.interface);
        if let Some(file) = self.leases.record(&name)? {
            if self.is_answered_by(&file)? {
                return Ok(Attempt::Taken(file.record.leases().to_vec()));
            }
            self.leases.free(&file, self.order.cooldown)?;
        }
        let (full, chosen, mut view) = self.choose_all()?;
        if !full.is_empty() {
            let chosen = chosen.into_iter().map(|of| of.lease).collect();
            return Ok(Attempt::Full(full, chosen));
        }
        let leases: Vec<Lease> = chosen.iter().map(|of| of.lease.clone()).collect();
        if let Err(error) = self.write(&name, &chosen) {
            // The first error is the one to report.
            if let Ok(Some(file)) = self.leases.record(&name) {
                let _ = self.leases.free(&file, Duration::ZERO);
            }
            self.leases.remove_aside();
            return Err(error.into());
        }
        // It decides nothing.
        let _ = self.note(&mut view);
        Ok(Attempt::Taken(leases))
    }

    /// Whether a record answers the order, and holds all that it names.
    fn is_answered_by(&self, file: &RecordFile) -> Result<bool, LeaseError> {
        if !self.order.is_answered_by(&file.record) {
            return Ok(false);
        }
        let mut leases = file.record.leases().iter();
        leases.try_fold(
            true,
            |all, lease| Ok(all && self.leases.holds(file, lease)?),
        )
    }

    /// An address for each request, or that there is none where it looked.
    fn choose_all(&mut self) -> Result<(Vec<usize>, Vec<Chosen>, View), Refused> {
        let mut view = View::default();
        let (mut full, mut chosen) = (Vec::new(), Vec::new());
        let mut addresses: Vec<Option<IpAddr>> = Vec::new();
        let owned = self.owned()?;
        let order = self.order;
        for (number, request) in order.requests.iter().enumerate() {
            let refused = |error| Refused {
                request: Some(number),
                error,
            };
            let address = match request.requested {
                Some(address) => {
                    self.check_requested(request, address, owned.as_ref(), &mut view)
                        .map_err(refused)?;
                    Some(address)
                }
                None => {
                    let range = match &owned {
                        None => Cow::Borrowed(&request.range),
                        Some(owned) => Cow::Owned(owned.cut(
                            &request.range,
                            &order.holder.node,
                            &self.leases.boot,
                        )),
                    };
                    let like = self.same_host_number(request, &addresses);
                    self.choose(number, &range, like, &mut view)
                        .map_err(refused)?
                }
            };
            addresses.push(address);
            let Some(address) = address else {
                full.push(number);
                continue;
            };
            let space = order.space_of(request);
            let shown = self.shown(&mut view, &space, Subnet::of(address))?;
            let mark = shown.freed_at(name::byte_of(address));
            shown.lease(name::byte_of(address));
            let lease = order.lease(number, request, address);
            chosen.push(Chosen { lease, mark });
        }
        Ok((full, chosen, view))
    }

    fn check_requested(
        &mut self,
        request: &AddressRequest,
        address: IpAddr,
        owned: Option<&Owned>,
        view: &mut View,
    ) -> Result<(), LeaseError> {
        let (node, boot) = (&self.order.holder.node, &self.leases.boot);
        if self.is_hosts(address)? {
            return Err(LeaseError::OfThisNode { address });
        }
        if let Some(owned) = owned.filter(|of| !of.has(&request.range, address, node, boot)) {
            if let Some(network) = owned.network_of(&request.range, node, boot) {
                let range = request.range.subnet();
                return Err(LeaseError::OtherNetwork {
                    address,
                    network,
                    range,
                });
            }
            return Err(LeaseError::NeedsRoom(vec![Need {
                range: request.range.clone(),
                address: Some(address),
                count: 1,
            }]));
        }
        let space = self.order.space_of(request);
        let subnet = Subnet::of(address);
        let shown = self.shown(view, &space, subnet)?;
        if !shown.is_leased(name::byte_of(address)) {
            return Ok(());
        }
        let path = format!(
            "{}/{}/{}",
            space.directory(),
            subnet.name(),
            name::leased(address)
        );
        let holder = match self.leases.record_at(&path) {
            Ok(Some(file)) => {
                let created = file.record.leases().first().map(|lease| lease.created);
                let since =
                    created.map_or_else(String::new, |created| format!(", since {created}"));
                format!("{}{since}", file.record.holder())
            }
            // By an earlier request of this order.
            Ok(None) => self.order.holder.to_string(),
            Err(_) => "a holder whose record cannot be read".to_owned(),
        };
        Err(LeaseError::Held { address, holder })
    }

    /// The address with the host number of another request's.
    fn same_host_number(
        &self,
        request: &AddressRequest,
        chosen: &[Option<IpAddr>],
    ) -> Option<IpAddr> {
        let other = request.same_host_number_as?;
        let (other, address) = (
            self.order.requests.get(other)?,
            chosen.get(other).copied()??,
        );
        let number = bits(address).checked_sub(bits(other.range.subnet().network()))?;
        let subnet = request.range.subnet();
        let bits = bits(subnet.network()).checked_add(number)?;
        Some(from_bits(subnet.is_ipv4(), bits))
    }

    /// The address of a range that is leased next, where one directory shows one.
    fn choose(
        &mut self,
        number: usize,
        range: &Range,
        like: Option<IpAddr>,
        view: &mut View,
    ) -> Result<Option<IpAddr>, LeaseError> {
        let hot = self.hot();
        let order = self.order;
        let Some(request) = order.requests.get(number) else {
            return Ok(None);
        };
        let space = order.space_of(request);
        if let Some(address) = like.filter(|address| range.gives(*address)) {
            let shown = self.shown(view, &space, Subnet::of(address))?;
            if shown.is_free(name::byte_of(address), hot) && !self.is_hosts(address)? {
                return Ok(Some(address));
            }
        }
        let v4 = range.subnet().is_ipv4();
        let place = match self.places.get(number).copied().flatten() {
            Some(place) => place,
            None => {
                let start = self.ranges(view, &space)?.start(range);
                let mut from = subnets(v4, range.spans(), start);
                let first = from.next().or_else(|| subnets(v4, range.spans(), 0).next());
                let Some(subnet) = first else {
                    return Ok(None);
                };
                let cooling = Cooling::Wait;
                Place { subnet, cooling }
            }
        };
        let Place { subnet, cooling } = place;
        loop {
            let shown = self.shown(view, &space, subnet)?;
            let Some(byte) = shown.decide(usable(range.spans(), subnet), hot, cooling) else {
                return Ok(None);
            };
            let address = subnet.address(byte);
            if !self.is_hosts(address)? {
                return Ok(Some(address));
            }
            self.shown(view, &space, subnet)?.lease(byte);
        }
    }

    /// Whether an address is the host's own.
    fn is_hosts(&mut self, address: IpAddr) -> Result<bool, LeaseError> {
        if self.host.contains(&address) {
            return Ok(true);
        }
        let is_own = super::host::has(address).map_err(|source| LeaseError::Io {
            attempt: "ask the kernel for the route to",
            path: address.to_string().into(),
            source,
        })?;
        if is_own {
            self.host.insert(address);
        }
        Ok(is_own)
    }

    fn shown<'v>(
        &self,
        view: &'v mut View,
        space: &LeaseSpace,
        subnet: Subnet,
    ) -> Result<&'v mut Shown, LeaseError> {
        use std::collections::btree_map::Entry;
        match view.subnets.entry((space.clone(), subnet)) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(new) => Ok(new.insert(self.read(space, subnet)?)),
        }
    }

    fn read(&self, space: &LeaseSpace, subnet: Subnet) -> Result<Shown, LeaseError> {
        let path = format!("{}/{}", space.directory(), subnet.name());
        let names = self.leases.dir.names(&path)?.unwrap_or_default();
        let mut shown = Shown::of(names.iter().map(String::as_str));
        let here = self
            .host
            .iter()
            .filter(|address| Subnet::of(**address) == subnet);
        here.for_each(|address| shown.lease(name::byte_of(*address)));
        Ok(shown)
    }

    fn ranges<'v>(
        &self,
        view: &'v mut View,
        space: &LeaseSpace,
    ) -> Result<&'v mut Ranges, LeaseError> {
        use std::collections::btree_map::Entry;
        match view.ranges.entry(space.clone()) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(new) => Ok(new.insert(self.leases.ranges(space)?)),
        }
    }

    /// Writes the record, then the names of its addresses.
    fn write(&self, name: &str, chosen: &[Chosen]) -> Result<(), LeaseError> {
        let leases = chosen.iter().map(|of| of.lease.clone()).collect();
        let Some(record) = Record::of(leases, since_boot()) else {
            return Ok(());
        };
        let text = record.encode();
        if text.len() as u64 > lease::MAX_BYTES {
            return Err(LeaseError::Oversize {
                bytes: text.len(),
                most: lease::MAX_BYTES,
            });
        }
        let dir = &self.leases.dir;
        let path = format!("{RECORDS}/{name}");
        dir.write(ASIDE, &text)?;
        dir.place(ASIDE, &path)?;
        for Chosen { lease, mark } in chosen {
            dir.link(&path, &super::leased_path(lease))?;
            if let Some(at) = mark {
                dir.remove(&super::freed_path(lease, *at))?;
            }
        }
        Ok(())
    }

    /// Notes where ranges have room, where that is not what was noted: what is leased out of the order
    /// says nothing of the addresses before it.
    fn note(&self, view: &mut View) -> Result<(), LeaseError> {
        let order = self.order;
        let mut changed: BTreeMap<LeaseSpace, Ranges> = BTreeMap::new();
        for (request, place) in order.requests.iter().zip(&self.places) {
            let space = order.space_of(request);
            let known = self.ranges(view, &space)?;
            let ranges = changed.entry(space).or_insert_with(|| known.clone());
            let known = ranges
                .0
                .iter()
                .find(|pool| pool.range == request.range.subnet());
            let room = match (place, known) {
                (Some(place), _) if place.cooling == Cooling::Wait => place.subnet,
                (_, Some(known)) => Subnet::of(known.room),
                (_, None) => match request.range.lowest() {
                    Some(lowest) => Subnet::of(lowest),
                    None => continue,
                },
            };
            ranges.note(&request.range, &order.holder.network, room);
        }
        for (space, ranges) in changed {
            if ranges != *self.ranges(view, &space)? {
                self.leases.write_ranges(&space, &ranges)?;
            }
        }
        Ok(())
    }

    /// Searches for room beyond where an attempt looked. Without the lock.
    fn search(&mut self, full: &[usize], chosen: &[Lease]) -> Result<(), Refused> {
        let mut needs: Vec<Need> = Vec::new();
        let mut first = None;
        let mut found: Vec<(LeaseSpace, IpAddr)> = Vec::new();
        let order = self.order;
        for number in full {
            let Some(request) = order.requests.get(*number) else {
                continue;
            };
            let refused = |error| Refused {
                request: Some(*number),
                error,
            };
            let space = order.space_of(request);
            let taken = chosen
                .iter()
                .filter(|lease| LeaseSpace::of_lease(lease) == space);
            let mut taken: BTreeSet<IpAddr> = taken.map(|lease| lease.address).collect();
            taken.extend(
                found
                    .iter()
                    .filter(|(of, _)| *of == space)
                    .map(|(_, at)| *at),
            );
            let place = self
                .search_range(request, &space, &taken)
                .map_err(refused)?;
            if let Some((place, address)) = place {
                found.push((space, address));
                if let Some(slot) = self.places.get_mut(*number) {
                    *slot = Some(place);
                }
                continue;
            }
            first.get_or_insert(*number);
            match self.ownership {
                Ownership::All => {
                    let range = request.range.subnet().to_string();
                    let (first, last) = request.range.window();
                    let count = request.range.size();
                    let why =
                        format!("all {count} addresses between {first} and {last} are leased");
                    return Err(refused(LeaseError::Exhausted { range, why }));
                }
                Ownership::Parts { .. } => {
                    match needs.iter_mut().find(|need| need.range == request.range) {
                        Some(need) => need.count += 1,
                        None => needs.push(Need {
                            range: request.range.clone(),
                            address: None,
                            count: 1,
                        }),
                    }
                }
            }
        }
        match needs.is_empty() {
            true => Ok(()),
            false => Err(Refused {
                request: first,
                error: LeaseError::NeedsRoom(needs),
            }),
        }
    }

    /// A subnet of the range with an address besides those that are taken; if there is none, that with
    /// the address that has cooled longest, where that may be leased.
    fn search_range(
        &self,
        request: &'a AddressRequest,
        space: &LeaseSpace,
        taken: &BTreeSet<IpAddr>,
    ) -> Result<Option<(Place, IpAddr)>, LeaseError> {
        let range = self.cut(&request.range)?;
        let (v4, spans, hot) = (range.subnet().is_ipv4(), range.spans(), self.hot());
        let start = self.leases.ranges(space)?.start(&range);
        let from = subnets(v4, spans, start);
        let before = subnets(v4, spans, 0).take_while(|subnet| subnet.last() < start);
        let mut coolest: Option<(Duration, Subnet, u8)> = None;
        for subnet in from.chain(before) {
            let mut shown = self.read(space, subnet)?;
            let here = taken
                .iter()
                .filter(|address| Subnet::of(**address) == subnet);
            here.for_each(|address| shown.lease(name::byte_of(*address)));
            if let Some(byte) = shown.decide(usable(spans, subnet), hot, Cooling::Wait) {
                let cooling = Cooling::Wait;
                return Ok(Some((Place { subnet, cooling }, subnet.address(byte))));
            }
            if let Some((at, byte)) = shown.coolest(usable(spans, subnet))
                && coolest.is_none_or(|(than, ..)| at < than)
            {
                coolest = Some((at, subnet, byte));
            }
        }
        let may_cool = match self.ownership {
            Ownership::All => true,
            Ownership::Parts { last_resort, .. } => *last_resort,
        };
        let cooling = Cooling::LastResort;
        Ok(coolest
            .filter(|_| may_cool)
            .map(|(_, subnet, byte)| (Place { subnet, cooling }, subnet.address(byte))))
    }
}
