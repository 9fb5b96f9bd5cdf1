#include "place.h"

#include "core/half.h"

namespace flashoverlap::layers {

Matrix::Matrix(Place& place, std::int64_t rows, std::int64_t cols)
    : place_(place), rows_(rows), cols_(cols), memory_(place.allocate(bytes())) {
  poison();
}

Matrix::Matrix(Place& place, std::int64_t rows, std::int64_t cols, const Values& values)
    : place_(place), rows_(rows), cols_(cols), memory_(place.allocate(bytes())) {
  write(values);
}

std::int64_t Matrix::bytes() const {
  return rows_ * cols_ * size_of(place_.dtype());
}

void Matrix::write_rows(std::int64_t first, const Values& values) const {
  const std::int64_t size = size_of(place_.dtype());
  std::vector<char> elements(values.size() * static_cast<std::size_t>(size));
  core::from_float(values.data(), place_.dtype(), elements.data(), std::ssize(values));
  place_.write(static_cast<char*>(data()) + first * cols_ * size, elements.data(), std::ssize(elements));
}

void Matrix::poison() {
  place_.poison(data(), bytes());
}

Values Matrix::read() const {
  std::vector<char> elements(static_cast<std::size_t>(bytes()));
  place_.read(data(), elements.data(), bytes());
  Values values(static_cast<std::size_t>(rows_ * cols_));
  core::to_float(elements.data(), place_.dtype(), values.data(), std::ssize(values));
  return values;
}

}  // namespace flashoverlap::layers
