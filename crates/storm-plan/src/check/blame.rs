//! Turns what a walk found into an error message.

use super::error::{Actor, CheckError, Found, Spot};
use super::memory::{Conflict, Content, Stamp};
use super::walk::Walk;
use crate::plan::ValueId;
use crate::tier::Tier;
use std::ops::Range;

impl Walk<'_> {
    pub(super) fn actor(&self, stamp: Stamp) -> Actor {
        match self.given_out.iter().nth(stamp.thread) {
            None => Actor::Host,
            Some((_, given)) => Actor::instruction(self.plan, given[stamp.count as usize - 1]),
        }
    }

    pub(super) fn found(&self, wanted: Content, content: Option<Content>) -> Found {
        match content {
            None => Found::Nothing,
            Some(content) if content.value != wanted.value => {
                Found::Other(self.plan.value(content.value).name.clone())
            }
            Some(content) if content.position != wanted.position => Found::Shifted,
            Some(_) => Found::Stale,
        }
    }

    pub(super) fn wrong_content(
        &self,
        reader: Stamp,
        tier: Tier,
        bytes: Range<usize>,
        wanted: Content,
        content: Option<Content>,
    ) -> CheckError {
        CheckError::WrongContent {
            reader: self.actor(reader),
            spot: Spot::new(self.plan, Some(wanted.value), tier, bytes),
            found: self.found(wanted, content),
        }
    }

    pub(super) fn read_conflict(
        &self,
        reader: Stamp,
        value: Option<ValueId>,
        tier: Tier,
        conflict: Conflict,
    ) -> CheckError {
        CheckError::UnorderedRead {
            reader: self.actor(reader),
            spot: Spot::new(self.plan, value, tier, conflict.bytes),
            writer: self.actor(conflict.with),
        }
    }

    pub(super) fn write_conflict(
        &self,
        writer: Actor,
        value: Option<ValueId>,
        tier: Tier,
        conflict: Conflict,
    ) -> CheckError {
        let spot = Spot::new(self.plan, value, tier, conflict.bytes);
        let other = self.actor(conflict.with);
        match conflict.was_write {
            true => CheckError::UnorderedWrite { writer, spot, earlier: other },
            false => CheckError::OverwriteBeforeRead { writer, spot, reader: other },
        }
    }
}
