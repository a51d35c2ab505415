//! What the kernel does when it is asked.

use super::*;

/// What a request is answered with, or the errno.
type Done = Result<Vec<Object>, i32>;

impl State {
    pub(super) fn act(&mut self, asked: &Object, flags: u16) -> Done {
        let (_, new, _) = family(asked.kind);
        let is_dump = flags & NLM_F_DUMP == NLM_F_DUMP;
        match asked.kind {
            _ if is_dump => Ok(self.matching(new, asked)),
            18 => Ok(vec![self.objects[self.link(asked)?].clone()]),
            NEWLINK if flags & NLM_F_CREATE != 0 => self.create(asked, flags),
            NEWLINK | 19 => self.set_link(asked),
            17 => {
                let link = self.link(asked)?;
                self.forget(link);
                Ok(Vec::new())
            }
            NEWLINKPROP | 109 => self.set_altnames(asked),
            NEWNSID | 90 => {
                let other =
                    self.namespaces[&number(asked.get(3).unwrap()).unwrap().cast_signed()].clone();
                let numbers = self.numbers.entry(asked.namespace.clone()).or_default();
                if asked.kind == NEWNSID {
                    numbers.push(other);
                    return Ok(Vec::new());
                }
                let known = numbers.iter().position(|name| *name == other);
                let mut answer = asked.clone();
                answer.kind = NEWNSID;
                answer.set(1, &known.map_or(-1, |number| number as i32).to_ne_bytes());
                Ok(vec![answer])
            }
            38 => match self.matching(new, asked) {
                none if none.is_empty() => Err(libc::ENOENT),
                found => Ok(found),
            },
            RDMA_CHARDEV | RDMA_SET => self.rdma(asked),
            // RTM_NEW* and RTM_DEL* of addresses, routes, rules and neighbours.
            kind if kind & 3 == 0 => {
                if flags & NLM_F_EXCL != 0 && self.objects.iter().any(|o| o.is_like(asked)) {
                    return Err(libc::EEXIST);
                }
                self.objects.retain(|object| !object.is_like(asked));
                self.objects.push(asked.clone());
                Ok(Vec::new())
            }
            _ => {
                let is_it = |object: &Object| object.kind == new && object.has_all(asked);
                let Some(at) = self.objects.iter().position(is_it) else {
                    let missing = [(NEWADDR, libc::EADDRNOTAVAIL), (NEWROUTE, libc::ESRCH)];
                    let errno = missing.iter().find(|(kind, _)| *kind == new);
                    return Err(errno.map_or(libc::ENOENT, |(_, errno)| *errno));
                };
                self.objects.remove(at);
                Ok(Vec::new())
            }
        }
    }

    /// The objects that a dump with this filter shows.
    fn matching(&self, kind: u16, filter: &Object) -> Vec<Object> {
        let all = self.objects.iter();
        let of_kind = all.filter(|o| o.kind == kind && o.namespace == filter.namespace);
        let is_shown = |object: &&Object| {
            // Families, links by index, and in attributes the controller, the table or the link.
            let family = filter.header.first().copied().unwrap_or(0);
            let at = filter.index_at();
            let index = at.map_or(0, |at| word(&filter.header, at));
            let parent = if kind == NEWQDISC { 12 } else { 0 };
            let mut filters = filter
                .attributes
                .iter()
                .filter(|(k, _)| *k != IFLA_EXT_MASK);
            (family == 0 || object.header[0] == family)
                && (index == 0 || at.is_some_and(|at| word(&object.header, at) == index))
                && (parent == 0 || object.header[parent..16] == filter.header[parent..16])
                && match kind {
                    NEWNEIGH => filters
                        .filter(|(k, _)| *k == 8)
                        .all(|(_, link)| word(&object.header, 4) == number(link).unwrap()),
                    _ => filters.all(|wanted| object.attributes.contains(wanted)),
                }
        };
        of_kind.filter(is_shown).cloned().collect()
    }

    /// Where the link is that a request names.
    fn link(&self, asked: &Object) -> Result<usize, i32> {
        let index = word(&asked.header, 4);
        let name = [IFLA_IFNAME, IFLA_ALT_IFNAME].map(|kind| asked.get(kind));
        let name = name.into_iter().flatten().next().map(Name::of_attribute);
        let mut objects = self.objects.iter();
        let found = objects.position(|object| {
            let is_it = match (index, &name) {
                (0, Some(name)) => object.names().contains(name),
                (index, _) => word(&object.header, 4) == index,
            };
            object.kind == NEWLINK && object.namespace == asked.namespace && is_it
        });
        found.ok_or(libc::ENODEV)
    }

    fn by(&self, namespace: &str, index: u32, name: Option<&[u8]>) -> Option<usize> {
        let mut asked = Object::new(namespace, NEWLINK, &[0; 16]);
        put(&mut asked.header, 4, &index.to_ne_bytes());
        let _ = name.map(|name| asked.set(IFLA_IFNAME, name));
        self.link(&asked).ok()
    }

    fn create(&mut self, asked: &Object, flags: u16) -> Done {
        let mut made = asked.clone();
        let name = made.get(IFLA_IFNAME).unwrap().to_vec();
        let index = word(&made.header, 4);
        let is_taken = |index| self.by(&made.namespace, index, None).is_some();
        // A clash of indexes is EEXIST here, and EBUSY in a move.
        if self.by(&made.namespace, 0, Some(&name)).is_some() || index != 0 && is_taken(index) {
            return Err(libc::EEXIST);
        }
        let index = match index {
            0 => (2..).find(|index| !is_taken(*index)).unwrap(),
            index => index,
        };
        put(&mut made.header, 4, &index.to_ne_bytes());
        if let Some(parent) = made.get(IFLA_LINK).and_then(number) {
            let namespace = match made.get(IFLA_LINK_NETNSID).and_then(number) {
                Some(number) => &self.numbers[&made.namespace][number as usize],
                None => &made.namespace,
            };
            let parent = self.by(namespace, parent, None).ok_or(libc::ENODEV)?;
            let parent = &self.objects[parent];
            put(&mut made.header, 2, &parent.header[2..4]);
            for kind in [IFLA_ADDRESS, IFLA_MTU] {
                if made.get(kind).is_none() {
                    let value = parent.get(kind).unwrap_or_default().to_vec();
                    made.set(kind, &value);
                }
            }
        }
        self.objects.push(made.clone());
        Ok(if flags & NLM_F_ECHO != 0 {
            vec![made]
        } else {
            Vec::new()
        })
    }

    fn set_link(&mut self, asked: &Object) -> Done {
        let at = self.link(asked)?;
        let mut link = self.objects[at].clone();
        let mask = word(&asked.header, 12);
        let flags = word(&link.header, 8) & !mask | word(&asked.header, 8) & mask;
        put(&mut link.header, 8, &flags.to_ne_bytes());
        for (kind, value) in &asked.attributes {
            match *kind {
                IFLA_NET_NS_FD => {
                    let descriptor = number(value).unwrap().cast_signed();
                    link.namespace = self.namespaces[&descriptor].clone();
                }
                IFLA_NEW_IFINDEX | IFLA_AF_SPEC => {}
                IFLA_IFALIAS if value.is_empty() => link.attributes.retain(|(k, _)| k != kind),
                _ => link.set(*kind, value),
            }
        }
        let old = self.objects[at].clone();
        let name = link.get(IFLA_IFNAME).unwrap();
        let same = self.by(&link.namespace, 0, Some(name));
        if same.is_some_and(|other| other != at) {
            return Err(libc::EEXIST);
        }
        if link.namespace != old.namespace {
            let is_taken = |index| self.by(&link.namespace, index, None).is_some();
            let index = match asked.get(IFLA_NEW_IFINDEX).and_then(number) {
                Some(index) if is_taken(index) => return Err(libc::EBUSY),
                Some(index) => index,
                None => Some(word(&link.header, 4))
                    .filter(|index| !is_taken(*index))
                    .or_else(|| (2..).find(|index| !is_taken(*index)))
                    .unwrap(),
            };
            put(&mut link.header, 4, &index.to_ne_bytes());
            put(&mut link.header, 8, &(flags & !1).to_ne_bytes());
            self.forget(at);
            self.objects.push(link);
        } else {
            self.objects[at] = link;
        }
        Ok(Vec::new())
    }

    /// Removes a link with its addresses, routes and neighbours.
    fn forget(&mut self, link: usize) {
        let link = self.objects.remove(link);
        let index = word(&link.header, 4);
        self.objects.retain(|object| {
            let on = match object.kind {
                NEWADDR | NEWNEIGH => word(&object.header, 4),
                NEWROUTE => object.get(4).and_then(number).unwrap_or(0),
                _ => 0,
            };
            object.namespace != link.namespace || on != index
        });
    }

    fn set_altnames(&mut self, asked: &Object) -> Done {
        let at = self.link(asked)?;
        let mut names = self.objects[at].names().split_off(1);
        let mut result = Ok(Vec::new());
        attribute::each(asked.get(IFLA_PROP_LIST).unwrap_or_default(), |_, name| {
            let is_taken = self.by(&asked.namespace, 0, Some(name)).is_some();
            match asked.kind {
                NEWLINKPROP if is_taken => result = Err(libc::EEXIST),
                NEWLINKPROP => names.push(Name::of_attribute(name)),
                _ => names.retain(|known| *known != Name::of_attribute(name)),
            }
        });
        let list = (names.iter()).fold(Raw::default(), |list, name| {
            list.with(IFLA_ALT_IFNAME, &name.to_attribute())
        });
        self.objects[at].set(IFLA_PROP_LIST, list.as_bytes());
        result
    }

    /// Moves or renames an RDMA device, or shows its character device.
    fn rdma(&mut self, asked: &Object) -> Done {
        let is_it = |object: &&mut Object| {
            let kinds = [RDMA_DEVICE, RDMA_CHARDEV];
            kinds.contains(&object.kind)
                && object.namespace == asked.namespace
                && object.get(1) == asked.get(1)
        };
        let mut found: Vec<_> = self.objects.iter_mut().filter(is_it).collect();
        if found.is_empty() {
            return Err(libc::ENODEV);
        }
        if asked.kind == RDMA_CHARDEV {
            found.retain(|object| object.kind == RDMA_CHARDEV);
            return Ok(found.into_iter().map(|object| object.clone()).collect());
        }
        for object in found {
            if let Some(descriptor) = asked.get(68).and_then(number) {
                object.namespace = self.namespaces[&descriptor.cast_signed()].clone();
            }
            if let Some(name) = asked.get(2)
                && object.kind == RDMA_DEVICE
            {
                object.set(2, name);
            }
        }
        Ok(Vec::new())
    }
}
