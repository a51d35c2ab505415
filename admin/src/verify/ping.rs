//! The closing lines of `ping`, of iputils and of busybox.

/// What came back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Echoes {
    /// Packets sent.
    pub sent: u32,
    /// Packets that came back.
    pub received: u32,
    /// Average time there and back in milliseconds, where the tool says it.
    pub average: Option<f64>,
}

/// Reads the summary; `None` if there is none.
pub(super) fn read(text: &str) -> Option<Echoes> {
    let line = text
        .lines()
        .find(|line| line.contains(" packets transmitted, "))?;
    // iputils: "3 packets transmitted, 3 received, …"; busybox: "…, 3 packets received, …".
    let mut numbers = line.split(", ").map(|part| {
        let number = part.split_whitespace().next();
        number.and_then(|number| number.parse::<u32>().ok())
    });
    let (sent, received) = (numbers.next()??, numbers.next()??);
    let times = text.lines().find(|line| {
        line.starts_with("rtt min/avg/max") || line.starts_with("round-trip min/avg/max")
    });
    let average = times
        .and_then(|line| line.split(" = ").nth(1))
        .and_then(|times| times.split('/').nth(1))
        .and_then(|average| average.parse().ok());
    Some(Echoes {
        sent,
        received,
        average,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_tools_are_read() {
        let iputils = "--- 10.0.0.1 ping statistics ---\n\
            3 packets transmitted, 3 received, 0% packet loss, time 2037ms\n\
            rtt min/avg/max/mdev = 0.120/0.179/0.293/0.081 ms\n";
        let busybox = "3 packets transmitted, 2 packets received, 33% packet loss\n\
            round-trip min/avg/max = 0.061/0.070/0.090 ms\n";
        let lost = "3 packets transmitted, 0 received, +3 errors, 100% packet loss, time 2053ms\n";
        let read = |text| read(text).map(|e: Echoes| (e.sent, e.received, e.average));
        assert_eq!(read(iputils), Some((3, 3, Some(0.179))));
        assert_eq!(read(busybox), Some((3, 2, Some(0.07))));
        assert_eq!(read(lost), Some((3, 0, None)));
        assert_eq!(read("ping: unknown host"), None);
    }
}
