use std::fmt;

/// The extents of a tensor's axes, row-major. A scalar has no axes.
///
/// The byte count at 8 bytes per element always fits in a `usize`: [`Shape::checked`] returns
/// `None` if it does not, and every other constructor panics.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// The shape of a single number.
    pub fn scalar() -> Shape {
        Shape(Vec::new())
    }

    /// A shape whose byte count, at 8 bytes per element, does not overflow.
    pub fn checked(axes: &[usize]) -> Option<Shape> {
        let mut count: usize = 8;
        for &axis in axes {
            count = count.checked_mul(axis.max(1))?;
        }
        Some(Shape(axes.to_vec()))
    }

    /// The extents.
    pub fn axes(&self) -> &[usize] {
        &self.0
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements. 1 for a scalar.
    pub fn elements(&self) -> usize {
        self.0.iter().product()
    }

    /// The last extent. 1 for a scalar. Most ops treat a tensor as rows of this width.
    pub fn width(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all extents but the last.
    pub fn rows(&self) -> usize {
        self.0[..self.0.len().saturating_sub(1)].iter().product()
    }

    /// The same rows with another width: `(B, T, C)` becomes `(B, T, width)`.
    ///
    /// # Panics
    /// If the result has too many elements.
    pub fn with_width(&self, width: usize) -> Shape {
        let mut axes = self.0.clone();
        match axes.last_mut() {
            Some(last) => *last = width,
            None => axes.push(width),
        }
        Shape::from(&axes[..])
    }

    /// The shape without its last axis: one element per row.
    pub fn row_shape(&self) -> Shape {
        Shape(self.0[..self.0.len().saturating_sub(1)].to_vec())
    }

    /// The shape with another axis appended.
    ///
    /// # Panics
    /// If the result has too many elements.
    pub fn then(&self, extent: usize) -> Shape {
        let mut axes = self.0.clone();
        axes.push(extent);
        Shape::from(&axes[..])
    }
}

/// # Panics
/// If the shape has too many elements. [`Shape::checked`] does not panic.
impl From<&[usize]> for Shape {
    fn from(axes: &[usize]) -> Shape {
        Shape::checked(axes).unwrap_or_else(|| panic!("a tensor of {axes:?} has too many elements"))
    }
}

/// # Panics
/// As for slices.
impl<const N: usize> From<[usize; N]> for Shape {
    fn from(axes: [usize; N]) -> Shape {
        Shape::from(&axes[..])
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (i, axis) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{axis}")?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_is_one_element_in_one_row() {
        let scalar = Shape::scalar();
        assert_eq!((scalar.elements(), scalar.rows(), scalar.width()), (1, 1, 1));
    }

    #[test]
    fn rows_and_width_split_the_elements() {
        let shape = Shape::from([2, 3, 5]);
        assert_eq!((shape.rows(), shape.width(), shape.elements()), (6, 5, 30));
        assert_eq!(shape.with_width(7), Shape::from([2, 3, 7]));
        assert_eq!(shape.row_shape(), Shape::from([2, 3]));
    }

    #[test]
    fn a_shape_that_overflows_is_refused() {
        assert!(Shape::checked(&[usize::MAX, 2]).is_none());
        assert!(Shape::checked(&[1 << 30, 1 << 30]).is_some_and(|s| s.rank() == 2));
        assert!(Shape::checked(&[1 << 31, 1 << 31]).is_none());
    }
}
