#include "command_line.h"

int main(int argc, char** argv) {
  return flashoverlap::cli::run_command_line(argc, argv);
}
