//! Damps what ports do, so that a link that flaps does not make its units flap.
//!
//! A port that goes down is reported at once (unless a delay is configured); one that comes back
//! has to stay up for a moment, and longer if it went down often of late. A move of its netdev to a
//! pod or back takes a port down, too, and says nothing about the link: until it was active on the
//! host since, it is reported only when it stays down. Missing nodes and devices are not damped:
//! nothing can be delivered without them, and everything once they are there.
//!
//! Time comes in as a parameter; nothing here reads a clock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hca::{Hca, HcaId};

use crate::config::{Damping, ResourceName};
use crate::pool::Held;
use crate::snapshot::{Snapshot, UnhealthyReason};

/// How long a port may be down after a move of its netdev: a link is trained in seconds.
const MOVE_GRACE_PERIOD: Duration = Duration::from_secs(15);

/// What ports did so far, for every HCA of every resource.
#[derive(Debug, Default)]
pub struct Damper {
    tracks: BTreeMap<(ResourceName, HcaId), Track>,
}

/// What a scan shows of an HCA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sight {
    /// Whether its ports can carry traffic, or wait for the CNI plugin to set them up.
    up: bool,
    /// Whether one of them is active.
    active: bool,
    /// Whether a netdev of it is in another network namespace.
    away: bool,
    /// Whether a pod holds it.
    held: bool,
}

/// The history of one HCA in one resource.
#[derive(Debug)]
struct Track {
    up: bool,
    away: bool,
    /// Since when both are so.
    since: Instant,
    /// Whether a pod had a netdev of it, and no port was active on the host since.
    moved: bool,
    /// Whether that was reported to the kubelet.
    reported_up: bool,
    /// When they went down, oldest first, within the window.
    downs: Vec<Instant>,
    /// What was last seen wrong.
    trouble: String,
}

impl Damper {
    /// Replaces what each member's ports are by what is to be reported of them. `held` has the HCAs that
    /// pods hold. Returns when to look again at the latest, because a delay ends then.
    pub fn damp(
        &mut self,
        pools: &mut [Snapshot],
        held: &Held,
        damping: &Damping,
        now: Instant,
    ) -> Option<Instant> {
        let mut again: Option<Instant> = None;
        let mut tracks = BTreeMap::new();
        for pool in pools {
            let resource = pool.resource().clone();
            for member in pool.members_mut() {
                let key = (resource.clone(), member.hca.id.clone());
                let known = self.tracks.remove(&key);
                // What is not here, or cannot be read, says nothing about its ports.
                if member.health.has(|reason| {
                    matches!(
                        reason,
                        UnhealthyReason::Gone | UnhealthyReason::Unreadable(_)
                    )
                }) {
                    tracks.extend(known.map(|track| (key, track)));
                    continue;
                }
                let of_port = |reason: &UnhealthyReason| matches!(reason, UnhealthyReason::Port(_));
                let trouble = member
                    .health
                    .reasons()
                    .iter()
                    .find(|reason| of_port(reason));
                let trouble = trouble.map(ToString::to_string);
                let sight = Sight {
                    up: trouble.is_none(),
                    active: member.hca.ports().any(|(_, port)| port.is_active()),
                    away: is_away(&member.hca),
                    held: held.contains_key(&member.hca.id),
                };
                let mut track = known.unwrap_or_else(|| Track::begin(sight, now));
                track.see(sight, now, damping);
                track.trouble = trouble.unwrap_or(track.trouble);
                let (reason, due) = track.judge(now, damping);
                tracks.insert(key, track);
                member.health.remove(of_port);
                reason
                    .into_iter()
                    .for_each(|reason| member.health.add(reason));
                again = again.into_iter().chain(due).min();
            }
        }
        // Of what is in no pool any more nothing is kept.
        self.tracks = tracks;
        again
    }
}

/// Whether an HCA, or a netdev that is known of it, is in another network namespace: only what is there
/// has an interface index.
fn is_away(hca: &Hca) -> bool {
    hca.elsewhere || hca.netdevs.iter().any(|netdev| netdev.ifindex == 0)
}

impl Track {
    /// The first sight counts as it is; of an HCA that a pod has it says nothing.
    fn begin(sight: Sight, now: Instant) -> Self {
        Self {
            up: sight.up,
            away: sight.away,
            since: now,
            moved: false,
            reported_up: sight.up || sight.away && sight.held,
            downs: Vec::new(),
            trouble: String::new(),
        }
    }

    fn see(&mut self, sight: Sight, now: Instant, damping: &Damping) {
        let Sight { up, away, .. } = sight;
        self.moved = away && (sight.held || self.moved) || self.moved && !sight.active;
        if self.up && !up && !self.moved {
            self.downs.push(now);
        }
        if (up, away) != (self.up, self.away) {
            (self.up, self.away, self.since) = (up, away, now);
        }
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) <= damping.flap_window;
        self.downs.retain(is_recent);
    }

    /// What to report, and when that may change by itself.
    fn judge(
        &mut self,
        now: Instant,
        damping: &Damping,
    ) -> (Option<UnhealthyReason>, Option<Instant>) {
        let flapping = self.downs.len() >= usize::try_from(damping.flaps).unwrap_or(usize::MAX);
        let delay = match (self.up, flapping) {
            (false, _) if self.moved => damping.down_delay.max(MOVE_GRACE_PERIOD),
            (false, _) => damping.down_delay,
            (true, false) => damping.up_delay,
            (true, true) => damping.flap_hold.max(damping.up_delay),
        };
        // A time that the clock cannot hold never comes.
        let due = self.since.checked_add(delay);
        if self.reported_up != self.up && due.is_some_and(|due| now >= due) {
            self.reported_up = self.up;
        }
        let again = due.filter(|_| self.reported_up != self.up);
        let reason = match (self.reported_up, self.up) {
            (true, _) => None,
            (false, false) => Some(UnhealthyReason::Port(self.trouble.clone())),
            (false, true) if flapping => Some(UnhealthyReason::Flapping(format!(
                "its ports went down {} times within {:?}; waiting for {delay:?} without a change",
                self.downs.len(),
                damping.flap_window
            ))),
            (false, true) => Some(UnhealthyReason::Port(format!(
                "active again; waiting for {delay:?} without a change"
            ))),
        };
        (reason, again)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const DAMPING: Damping = Damping {
        down_delay: Duration::ZERO,
        up_delay: Duration::from_secs(1),
        flaps: 3,
        flap_window: Duration::from_secs(60),
        flap_hold: Duration::from_secs(30),
    };

    fn here(up: bool) -> Sight {
        Sight {
            up,
            active: up,
            away: false,
            held: false,
        }
    }

    /// Feeds states at seconds; returns whether the unit is shown healthy after each.
    fn play(damping: &Damping, states: &[(u64, bool)]) -> Vec<bool> {
        let start = Instant::now();
        let mut track = Track::begin(here(states[0].1), start);
        let at = |second: u64| start + Duration::from_secs(second);
        states
            .iter()
            .map(|(second, up)| {
                track.see(here(*up), at(*second), damping);
                track.judge(at(*second), damping).0.is_none()
            })
            .collect()
    }

    #[test]
    fn down_is_reported_at_once_and_up_after_a_moment() {
        let healthy = play(
            &DAMPING,
            &[(0, true), (5, false), (6, true), (7, true), (8, true)],
        );
        assert_eq!(healthy, [true, false, false, true, true]);
    }

    #[test]
    fn the_first_sight_is_taken_as_it_is() {
        assert_eq!(play(&DAMPING, &[(0, false)]), [false]);
        assert_eq!(play(&DAMPING, &[(0, true)]), [true]);
    }

    #[test]
    fn a_flapping_port_has_to_calm_down_first() {
        let mut states = vec![(0, true)];
        for second in [2, 4, 6] {
            states.extend([(second, false), (second + 1, true)]);
        }
        states.extend([(10, true), (36, true), (37, true)]);
        let healthy = play(&DAMPING, &states);
        assert_eq!(healthy[1..=6], [false; 6]);
        assert_eq!(healthy[7..], [false, false, true]);
    }

    #[test]
    fn old_changes_are_forgotten() {
        let states = [
            (0, true),
            (1, false),
            (10, true),
            (20, false),
            (30, true),
            (90, false),
            (95, true),
            (96, true),
        ];
        assert_eq!(play(&DAMPING, &states).last(), Some(&true));
    }

    #[test]
    fn a_short_loss_can_be_overlooked() {
        let delayed = Damping {
            down_delay: Duration::from_secs(5),
            ..DAMPING
        };
        let healthy = play(
            &delayed,
            &[
                (0, true),
                (1, false),
                (3, false),
                (4, true),
                (10, false),
                (15, false),
            ],
        );
        assert_eq!(healthy, [true, true, true, true, true, false]);
    }

    proptest::proptest! {
        #[test]
        fn no_time_makes_the_damper_panic(
            times: [u64; 4],
            flaps: u32,
            steps in proptest::collection::vec((0_u64..1 << 40, proptest::array::uniform4(proptest::bool::ANY)), 1..8),
        ) {
            let [down_delay, up_delay, flap_window, flap_hold] = times.map(Duration::from_secs);
            let damping = Damping { down_delay, up_delay, flaps, flap_window, flap_hold };
            let start = Instant::now();
            let sight = |[up, active, away, held]: [bool; 4]| Sight { up, active, away, held };
            let mut track = Track::begin(sight(steps[0].1), start);
            for (seconds, seen) in steps {
                let now = start + Duration::from_secs(seconds);
                track.see(sight(seen), now, &damping);
                track.judge(now, &damping);
            }
        }
    }

    #[test]
    fn says_when_to_scan_again_and_why_it_waits() {
        let start = Instant::now();
        let mut track = Track::begin(here(true), start);
        track.see(here(false), start, &DAMPING);
        assert_eq!(track.judge(start, &DAMPING).1, None);
        let later = start + Duration::from_secs(4);
        track.see(here(true), later, &DAMPING);
        let (reason, again) = track.judge(later, &DAMPING);
        assert_eq!(again, Some(later + DAMPING.up_delay));
        let reason = reason.unwrap().to_string();
        assert!(reason.contains("active again"), "{reason}");
    }
}
