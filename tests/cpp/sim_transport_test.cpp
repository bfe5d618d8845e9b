// The simulated transport keeps the contract that the real one keeps.
#include <memory>
#include <string>

#include "sim/sim_fabric.h"
#include "transport_contract.h"

namespace kvpush {
namespace {

template <bool kCopyAtPost>
class SimPair {
 public:
  static std::string skip_reason() { return {}; }
  Transport& first() { return *first_; }
  Transport& second() { return *second_; }
  void progress() { queue_.run_until(queue_.now() + kMillisecond); }

 private:
  static sim::FabricFaults faults() {
    sim::FabricFaults faults;
    faults.copy_at_post = kCopyAtPost;
    faults.removal_breaks = !kCopyAtPost;
    return faults;
  }
  sim::EventQueue queue_;
  sim::SimFabric fabric_{queue_, sim::Random(1), faults()};
  std::unique_ptr<Transport> first_ = fabric_.attach("first");
  std::unique_ptr<Transport> second_ = fabric_.attach("second");
};

INSTANTIATE_TYPED_TEST_SUITE_P(SimTorn, TransportContract, SimPair<false>);
INSTANTIATE_TYPED_TEST_SUITE_P(SimCopyAtPost, TransportContract, SimPair<true>);

}  // namespace
}  // namespace kvpush
